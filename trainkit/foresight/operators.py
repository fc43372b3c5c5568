"""What torch's operators take and keep on a device, on shapes: products, norms, attention, dropout, the loss."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from trainkit.foresight.tape import Shape, Tape, Tensor
from trainkit.foresight.trace import COPIES

# As in trainkit/trainer/models/losses.py, which imports torch.
FEW = 1 << 22
AT_A_TIME = {True: 1 << 27, False: 1 << 23}  # on CUDA, and on a CPU
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


def broadcast(*shapes: Shape) -> Shape:
    """The shape of an elementwise operator's output."""
    width = max(map(len, shapes))
    wide = [(1,) * (width - len(each)) + each for each in shapes]
    return tuple(max(sizes) for sizes in zip(*wide, strict=True))


class Operators(Tape):
    """Each takes and gives tensors, and puts a node into the graph where one of them has a gradient."""

    # -- formats

    def cast(self, x: Tensor, item: float) -> Tensor:
        """In values of so many bytes."""
        if x.item == item:
            return x
        shape, before = x.shape, x.item
        return self.apply("_to_copy", [x], [(shape, item)], lambda g: [self.one("_to_copy", [g], shape, before)])

    def low(self, x: Tensor) -> Tensor:
        """As autocast gives it to a product: copies of trained weights stay until the step ends."""
        if not self.casting or x.item != 4:
            return x
        if x.number < 0 or not x.trained:
            return self.cast(x, self.half)
        if x.number not in self.copies:
            self.copies[x.number] = made = self.cast(x, self.half)
            assert made.storage is not None
            self.parts[made.storage.number] = COPIES
        return self.copies[x.number]

    def high(self, x: Tensor) -> Tensor:
        """As autocast on CUDA gives it to norms and powers."""
        return self.cast(x, 4) if self.casting and self.cuda and x.item == 2 else x

    def _to(self, g: Tensor, shape: Shape, item: float) -> Tensor:
        """A gradient in the shape and format of what it belongs to."""
        if g.shape != shape:
            g = self.one("sum.dim_IntList", [g], shape, g.item)
        return self.one("_to_copy", [g], g.shape, item) if g.item != item else g

    # -- between ranks, each of which has a part of a block (trainkit/trainer/parallel/tensor.py)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        return self.apply("all_reduce", [x], [(x.shape, x.item)], lambda g: [g.view()])

    def shared(self, x: Tensor) -> Tensor:
        """What each rank reads for its part."""
        shape, item = x.shape, x.item
        made = x.view()
        if x.node:
            self.attach([made], [x], [], lambda gs: [self.one("all_reduce", gs[:1], shape, item)])
        return made

    def sent(self, x: Tensor) -> Tensor:
        """Rows to the ranks of their experts, or back."""
        shape, item = x.shape, x.item
        name = "all_to_all_single"
        return self.apply(name, [x], [(shape, item)], lambda g: [self.one(name, [g], shape, item)])

    def gathered(self, x: Tensor, shape: Shape) -> Tensor:
        """All ranks' parts, laid out in their order."""
        of, item = x.shape, x.item

        def backward(g: Tensor) -> list[Tensor]:
            return [self.one("reduce_scatter_tensor", [self.one("cat", [g], shape, item)], of, item)]

        return self.apply("cat", [self.apply("all_gather_into_tensor", [x], [(shape, item)], backward)],
                          [(shape, item)], lambda g: [g.view()])  # fmt: skip

    # -- elementwise

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        shapes = (x.shape, x.item), (y.shape, y.item)
        wants = bool(x.node), bool(y.node)

        def backward(g: Tensor) -> list[Tensor | None]:
            return [self._to(g.view(), *of) if want else None for of, want in zip(shapes, wants, strict=True)]

        return self.apply("add.Tensor", [x, y], [(broadcast(x.shape, y.shape), max(x.item, y.item))], backward)

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        of_x, of_y, wants = (x.shape, x.item), (y.shape, y.item), (bool(x.node), bool(y.node))

        def times(g: Tensor, other: Tensor) -> Tensor:
            return self.one("mul.Tensor", [g, other], broadcast(g.shape, other.shape), max(g.item, other.item))

        def backward(g: Tensor, *kept: Tensor) -> list[Tensor | None]:
            made = [times(g, kept[0]) if wants[0] else None, times(g, kept[-1]) if wants[1] else None]
            for place, of in enumerate((of_x, of_y)):
                if (each := made[place]) is not None:
                    made[place] = None
                    made[place] = self._to(each, *of)
            return made

        keep = [each for each, want in ((y, wants[0]), (x, wants[1])) if want]
        shape = broadcast(x.shape, y.shape)
        return self.apply("mul.Tensor", [x, y], [(shape, max(x.item, y.item))], backward, keep=keep)

    def scale(self, x: Tensor, name: str = "mul.Tensor") -> Tensor:
        """By a number."""
        shape, item = x.shape, x.item
        return self.apply(name, [x], [(shape, item)], lambda g: [self.one(name, [g], shape, item)])

    def shift(self, x: Tensor) -> Tensor:
        """A number is added."""
        return self.apply("add.Tensor", [x], [(x.shape, x.item)], lambda g: [g.view()])

    def pow(self, x: Tensor) -> Tensor:
        """To a power, which a number says."""
        x = self.high(x)
        shape, item = x.shape, x.item
        return self.apply("pow.Tensor_Scalar", [x], [(shape, item)], self._power, keep=[x])

    def _power(self, g: Tensor, kept: Tensor) -> list[Tensor]:
        power = self.one("pow.Tensor_Scalar", [kept], kept.shape, kept.item)
        slope = self.one("mul.Scalar", [power], kept.shape, kept.item)
        return [self.one("mul.Tensor", [g, slope], kept.shape, kept.item)]

    def rsqrt(self, x: Tensor) -> Tensor:
        x = self.high(x)
        return self.apply("rsqrt", [x], [(x.shape, x.item)], self._power, keeps=[0])

    def mean(self, x: Tensor) -> Tensor:
        """Over the last dimension, which stays."""
        shape, item = x.shape, x.item
        out = (*shape[:-1], 1)
        return self.apply("mean.dim", [x], [(out, item)], lambda g: [self.one("div.Scalar", [g], shape, item)])

    def activation(self, x: Tensor, name: str) -> Tensor:
        """silu and gelu keep what they read, relu and tanh what they give; gelu_new is a formula of its own."""
        if name == "gelu_new":
            half = self.scale(x)
            return self.mul(half, self.shift(self.tanh(self.scale(self.add(x, self.scale(self.pow(x)))))))
        name = "gelu" if name.startswith("gelu") else "silu" if name == "swish" else name
        shape, item = x.shape, x.item
        slope = {"relu": "threshold_backward"}.get(name, f"{name}_backward")

        def backward(g: Tensor, kept: Tensor) -> list[Tensor]:
            return [self.one(slope, [g, kept], shape, item)]

        after = name in ("relu", "tanh")
        return self.apply(name, [x], [(shape, item)], backward, keep=[] if after else [x], keeps=[0] if after else [])

    def tanh(self, x: Tensor) -> Tensor:
        return self.activation(x, "tanh")

    def dropout(self, x: Tensor, chance: float) -> Tensor:
        """A byte a value on CUDA (native_dropout); on a CPU noise in the format of the values, which is multiplied."""
        if not chance:
            return x
        shape, item = x.shape, x.item
        if self.cuda:
            return self.apply(
                "native_dropout",
                [x],
                [(shape, item), (shape, 1)],
                lambda g, mask: [self.one("native_dropout_backward", [g, mask], shape, item)],
                keeps=[1],
            )
        noise = self.one("empty_like", [x], shape, item)
        self.run("bernoulli_.float", [noise])
        self.run("div_.Scalar", [noise])
        return self.mul(x, noise)

    def joined(self, parts: Sequence[Tensor], *shape: int) -> Tensor:
        """cat: gradients are parts of the whole's."""
        of, item = [(each.shape, each.item) for each in parts], max(each.item for each in parts)

        def backward(g: Tensor) -> list[Tensor]:
            return [self._to(g.view(*each), each, before) for each, before in of]

        return self.apply("cat", parts, [(shape, item)], backward)

    def part(self, x: Tensor, *shape: int, name: str = "slice_backward") -> Tensor:
        """A slice: the same memory, and a whole gradient."""
        return self.view(x, *shape, back=name)

    def clamp(self, x: Tensor) -> Tensor:
        """Between bounds that are tensors."""
        shape, item = x.shape, x.item
        self.one("abs", [x], shape, item)

        def backward(g: Tensor, kept: Tensor) -> list[Tensor]:
            inside = self.one("ge.Tensor", [kept], shape, 1)
            return [self.one("where.self", [inside, g], shape, item)]

        return self.apply("clamp.Tensor", [x], [(shape, item)], backward, keep=[x])

    # -- products

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool = False) -> Tensor:
        """weight: (outputs, inputs), or turned (GPT-2's Conv1D), whose bias is read first."""
        if turned and bias:
            bias = self.low(bias)
        x, weight = self.low(x), self.low(weight)
        bias = self.low(bias) if bias else None
        shape, rows, item = x.shape, prod(x.shape[:-1]), x.item
        inner, outer = weight.shape if turned else weight.shape[::-1]
        flops = 2 * rows * inner * outer
        wants, of_weight = (bool(x.node), bool(weight.node), bool(bias and bias.node)), weight.shape
        keep = [each for each, want in ((weight, wants[0]), (x, wants[1])) if want]

        def backward(g: Tensor, *kept: Tensor) -> list[Tensor | None]:
            for_x = for_weight = None
            if wants[1] and bias_shape is None:
                for_weight = self.one("mm", [g, kept[-1]], of_weight, item, flops)
            if wants[0]:
                for_x = self.one("mm", [g, kept[0]], shape, item, flops)
            if wants[1] and bias_shape is not None:
                for_weight = self.one("mm", [g, kept[-1]], of_weight, item, flops)
            for_bias = self.one("sum.dim_IntList", [g], bias_shape, item) if wants[2] and bias_shape else None
            return [for_x, for_weight, for_bias][: 2 + (bias_shape is not None)]

        bias_shape = bias.shape if bias else None
        inputs = [x, weight, bias] if bias else [x, weight]
        out = [((*shape[:-1], outer), item)]
        return self.apply("addmm" if bias else "mm", inputs, out, backward, keep=keep, flops=flops)

    def quantized(self, x: Tensor, shape: Shape, item: float) -> Tensor:
        """A product with frozen weights in few bits, whose values are made for it, and again in backward.

        bitsandbytes/autograd/_functions.py: MatMul4Bit; of 8 bits it is close. shape: (outputs, inputs). item: bytes
        of a value in the computation.
        """
        before = x.item
        x = self.cast(x, item)
        of, out, flops = x.shape, (*x.shape[:-1], shape[0]), 2 * prod(x.shape) * shape[0]

        def product(given: Tensor, made: Shape) -> Tensor:
            return self.one("mm", [given, self.one("dequantize", [], shape, item)], made, item, flops)

        made = product(x, out)
        if x.node:
            self.attach([made], [x], [], lambda gradients: [product(gradients[0], of)])
        return self.cast(made, before)

    def grouped(self, x: Tensor, weight: Tensor, outer: int) -> Tensor:
        """Rows by the weights of their expert. weight: (experts, …), cast each time, for it is read as a view."""
        x, weight = self.low(x), self.low(weight.view() if not weight.node else self.view(weight, *weight.shape))
        of_x, of_weight, item, wants = x.shape, weight.shape, x.item, (bool(x.node), bool(weight.node))
        flops = 2 * prod(of_x) * outer
        keep = [each for each, want in ((weight, wants[0]), (x, wants[1])) if want]

        def backward(g: Tensor, *kept: Tensor) -> list[Tensor | None]:
            for_weight = self.one("_grouped_mm", [g, kept[-1]], of_weight, item, flops) if wants[1] else None
            return [self.one("_grouped_mm", [g, kept[0]], of_x, item, flops) if wants[0] else None, for_weight]

        out = [((of_x[0], outer), item)]
        return self.apply("_grouped_mm", [x, weight], out, backward, keep=keep, flops=flops)

    def matmul(self, x: Tensor, y: Tensor, shape: Shape, inner: int) -> Tensor:
        """A batch of products (bmm). inner: the dimension that is summed over."""
        of_x, of_y, item, flops = x.shape, y.shape, x.item, 2 * prod(shape) * inner
        wants = bool(x.node), bool(y.node)

        def backward(g: Tensor, *kept: Tensor) -> list[Tensor | None]:
            for_y = self.one("bmm", [g, kept[-1]], of_y, item, flops) if wants[1] else None
            return [self.one("bmm", [g, kept[0]], of_x, item, flops) if wants[0] else None, for_y]

        keep = [each for each, want in ((y, wants[0]), (x, wants[1])) if want]
        return self.apply("bmm", [x, y], [(shape, item)], backward, keep=keep, flops=flops)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        of, item = weight.shape, weight.item

        def backward(g: Tensor, kept: Tensor) -> list[Tensor]:
            return [self.one("embedding_dense_backward", [g, kept], of, item)]

        shape = (*ids.shape, of[1])
        return self.apply("embedding", [weight], [(shape, item)], backward, keep=[ids], beside=[ids])

    # -- experts

    def rows(self, x: Tensor, order: Tensor) -> Tensor:
        """x[order]: the gradient is put back into zeros."""
        of, item, shape = x.shape, x.item, (order.shape[0], *x.shape[1:])

        def backward(g: Tensor, kept: Tensor) -> list[Tensor]:
            zeros = self.one("new_zeros", [], of, item)
            return [self.one("index_put", [zeros, g, kept], of, item)]

        return self.apply("index.Tensor", [x], [(shape, item)], backward, keep=[order], beside=[order])

    def top(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest of each row, and their places."""
        of, item, shape = x.shape, x.item, (*x.shape[:-1], count)
        places = Tensor(shape, 8)

        def backward(g: Tensor, kept: Tensor) -> list[Tensor]:
            zeros = self.one("new_zeros", [], of, item)
            return [self.one("scatter.src", [zeros, g, kept], of, item)]

        made = self.apply("topk", [x], [(shape, item), (shape, 8)], backward, keeps=[1])
        return made, places

    def put_back(self, x: Tensor, order: Tensor, shape: Shape) -> Tensor:
        """Rows added to zeros where they belong."""
        of, item = x.shape, x.item
        zeros = self.one("zeros_like", [], shape, item)

        def backward(g: Tensor, kept: Tensor, _: Tensor) -> list[Tensor]:
            return [self.one("index_select", [g, kept], of, item)]

        return self.apply("index_add", [x], [(shape, item)], backward, keep=[order, x], beside=[zeros, order])

    def normalized(self, x: Tensor) -> Tensor:
        """Divided by the sum of the last dimension."""
        of, item, narrow = x.shape, x.item, (*x.shape[:-1], 1)
        total = self.one("sum.dim_IntList", [x], narrow, item)

        def backward(g: Tensor, *kept: Tensor) -> list[Tensor]:
            for name in ("div.Tensor", "div.Tensor", "neg", "mul.Tensor", "sum.dim_IntList"):
                self.one(name, [g], of, item)
            return [self.one("add.Tensor", [self.one("div.Tensor", [g, kept[1]], of, item)], of, item)]

        return self.apply("div.Tensor", [x], [(of, item)], backward, keep=[x, total], beside=[total])

    def log_sum(self, x: Tensor) -> Tensor:
        """logsumexp over the last dimension."""
        x = self.high(x)
        shape, item = x.shape, x.item

        def backward(g: Tensor, kept: Tensor, _: Tensor) -> list[Tensor]:
            less = self.one("sub.Tensor", [kept], shape, item)
            slope = self.one("exp", [less], shape, item)
            return [self.one("mul.Tensor", [g, slope], shape, item)]

        return self.apply("logsumexp", [x], [(shape[:-1], item)], backward, keep=[x], keeps=[0])

    # -- norms

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Keeps what it reads, and of each row the mean and the deviation."""
        x, weight, bias = self.high(x), self.high(weight), self.high(bias) if bias else None
        shape, item, width, rows = x.shape, x.item, weight.shape, (*x.shape[:-1], 1)
        inputs = [x, weight, bias] if bias else [x, weight]
        wants = [bool(each.node) for each in inputs]

        def backward(g: Tensor, *kept: Tensor) -> list[Tensor | None]:
            outputs = [of for of, want in zip([shape, width, width], wants, strict=False) if want]
            made = iter(self.run("native_layer_norm_backward", [g, *kept], *((of, item) for of in outputs)))
            return [next(made) if want else None for want in wants]

        stats = 4 if self.cuda else item
        out = [(shape, item), (rows, stats), (rows, stats)]
        return self.apply("native_layer_norm", inputs, out, backward, keep=[x, *inputs[1:]], keeps=[1, 2])

    def rms_norm(self, x: Tensor, weight: Tensor, kind: str) -> Tensor:
        """As transformers writes it out: of llama, gemma (1 + weight), or t5."""
        item, wide = x.item, self.cast(x, 4)
        if kind == "t5":
            variance = self.mean(self.pow(wide))
            del wide
            x = self.mul(x, self.rsqrt(self.shift(variance)))
            return self.mul(weight, self.cast(x, 2) if weight.item == 2 else x)
        if kind == "gemma":
            normed = self.mul(wide, self.rsqrt(self.shift(self.mean(self.pow(wide)))))
            normed = self.mul(normed, self.shift(self.cast(weight, 4)))
            return self.cast(normed, item)
        x = wide
        variance = self.mean(self.pow(x))
        x = self.mul(x, self.rsqrt(self.shift(variance)))
        return self.mul(weight, self.cast(x, item))

    # -- attention

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x * cos + turned(x) * sin (RoFormer, Su et al. 2021)."""
        return self.add(self.mul(x, cos), self.mul(self._turned(x), sin))

    def _turned(self, x: Tensor) -> Tensor:
        """cat(-second half, first half)."""
        shape, item = x.shape, x.item
        half = (*shape[:-1], shape[-1] // 2)

        def backward(g: Tensor) -> list[Tensor]:
            negative = self.one("neg", [g], half, item)
            second = self.one("slice_backward", [negative], shape, item)
            del negative
            first = self.one("slice_backward", [g], shape, item)
            return [self.one("add.Tensor", [second, first], shape, item)]

        negative = self.one("neg", [x.view(*half)], half, item)
        return self.apply("cat", [x], [(shape, item)], backward, beside=[negative])

    def copied(self, x: Tensor, *shape: int, name: str = "clone") -> Tensor:
        """Laid out anew, repeated where the shape is larger; the gradient is summed where it was."""
        of, item = x.shape, x.item
        same = prod(of) == prod(shape or of)

        def backward(g: Tensor) -> list[Tensor]:
            return [g.view(*of) if same else self.one("sum.dim_IntList", [g], of, item)]

        return self.apply(name, [x], [(shape or of, item)], backward)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        dropout: float = 0.0,
        given: Tensor | None = None,
        joined: bool = False,
    ) -> Tensor:
        """Scaled dot-product attention by torch's choice of kernel. q: (batch, heads, rows, width of a head).

        given: a mask; a bool one (a byte a value) becomes an additive one for the kernel. joined: whether q lies in
        memory as its shape says, as FlashAttention's output then does, and not as a product gave it.
        """
        q, k, v = self.low(q), self.low(k), self.low(v)
        mask = self.low(given) if given is not None and given.item > 1 else given
        batch, heads, length, width = q.shape
        keys, item = k.shape[2], q.item
        rows = (batch, heads, length)
        flops = 4 * prod(rows) * keys * width
        outs: list[tuple[Shape, float]] = [(q.shape, item), (rows, 4)]
        if not self.cuda:
            if dropout or (mask is not None and mask.node):
                return self._plain(q, k, v, causal=causal, dropout=dropout, mask=mask)
            name, backs = f"{FLASH}_for_cpu", f"{FLASH}_for_cpu_backward"
            flops = 0
        elif item == 2 and mask is None and width <= 256 and self.capability >= (8, 0):
            name, backs = FLASH, f"{FLASH}_backward"
            outs += [((2,), 8), ((1,), 8), ((0,), 1)]
        else:
            name, backs = EFFICIENT, f"{EFFICIENT}_backward"
            if k.shape[1] != heads:
                whole = (batch, heads, keys, width)
                k, v = self.copied(k, *whole), self.copied(v, *whole)
            if mask is not None and mask.item == 1:
                added = self.one("zeros_like", [mask], mask.shape, item)
                self.run("masked_fill_.Scalar", [added, mask])
                mask = added
            outs[1] = ((batch, heads, -(-length // 32) * 32), 4)
            outs += [((1,), 8), ((1,), 8)]
        inputs = [q, k, v, mask] if mask is not None and mask.node else [q, k, v]
        beside = [mask] if mask is not None and not mask.node else []
        shapes = [each.shape for each in inputs]
        wants = [bool(each.node) for each in inputs]
        of_mask = mask.shape if mask is not None else ()

        def backward(g: Tensor, *kept: Tensor) -> list[Tensor | None]:
            if self.cuda:
                [self.fresh(backs, (size,), 1) for size in self._workspace(name, shapes[0], shapes[1], int(item))]
            sizes = [*shapes[:3], *([(*rows, keys)] if len(shapes) > 3 else [])]
            made = self.run(backs, [g, *kept], *((each, item) for each in sizes), flops=2.5 * flops)
            if len(made) > 3 and batch > 1:
                made[3] = self.one("sum.dim_IntList", made[3:], of_mask, item)
            return [each if want else None for each, want in zip(made, wants, strict=True)]

        keep, keeps = [*inputs, *beside], range(len(outs))
        mixed = self.apply(name, inputs, outs, backward, keep=keep, keeps=keeps, beside=beside, flops=flops)
        return self.copied(mixed) if joined and name.startswith(FLASH) else mixed

    def _workspace(self, name: str, query: Shape, key: Shape, item: int) -> Sequence[int]:
        """Bytes that a kernel takes in backward (trainkit/trainer/tracing/meter.py)."""
        batch, heads, length, width = query
        if name == EFFICIENT:
            return [batch * heads * length * 4, *([batch * heads * length * width * 4] if item == 2 else [])]
        rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
        repeated = [batch * heads * key[2] * width * item] * 2 if key[1] != heads else []
        return [batch * heads * rows * columns * 4, batch * heads * rows * 4, *repeated]

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float, mask: Tensor | None) -> Tensor:
        """_scaled_dot_product_attention_math: all scores, in fp32, which dropout needs on a CPU."""
        batch, heads, length, width = q.shape
        keys, item = k.shape[2], q.item
        q, k, v = self.cast(q, 4), self.cast(k, 4), self.cast(v, 4)
        if k.shape[1] != heads:
            whole = (batch, heads, keys, width)
            k, v = self.copied(k, *whole), self.copied(v, *whole)
        q = self.scale(q, "mul.Scalar")
        if causal:
            mask = self.one("where.self", [self.one("ones", [], (length, keys), 1)], (length, keys), q.item)
        scores = self.matmul(q, self.scale(k, "mul.Scalar"), (batch, heads, length, keys), width)
        if mask is not None:
            scores = self.add(scores, mask)
        shares = self.softmax(scores, "_safe_softmax")
        del scores
        shares = self.dropout(shares, dropout)
        mixed = self.matmul(shares, v, q.shape, keys)
        given = self.one("_to_copy", [shares], shares.shape, item) if item == 2 else None  # beside the output
        made = self.copied(self.cast(mixed, item))
        del given
        return made

    def softmax(self, x: Tensor, name: str = "_softmax") -> Tensor:
        x = self.high(x)
        shape, item = x.shape, x.item
        return self.apply(
            name,
            [x],
            [(shape, item)],
            lambda g, kept: [self.one("_softmax_backward_data", [g, kept], shape, item)],
            keeps=[0],
        )

    # -- loss

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Of logits (rows, choices): they and their softmax in fp32."""
        wide = self.cast(logits, 4)
        shape = wide.shape
        shares = self.apply(
            "_log_softmax",
            [wide],
            [(shape, 4)],
            lambda g, kept: [self.one("_log_softmax_backward_data", [g, kept], shape, 4)],
            keeps=[0],
        )
        return self.apply(
            "nll_loss_forward",
            [shares],
            [((), 4), ((), 4)],
            lambda g, kept, _: [self.one("nll_loss_backward", [g, kept], shape, 4)],
            keep=[shares],
            keeps=[1],
        )

    def linear_cross_entropy(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, scaled: bool) -> Tensor:
        """The loss of a linear layer's logits, of a few rows at a time (trainkit/trainer/models/losses.py).

        scaled: whether gradients are (fp16), for which logits are made whole.
        """
        count, width = prod(x.shape[:-1]), x.shape[-1]
        choices = weight.shape[0]
        x = self.view(x, count, width)
        if count * choices <= FEW or scaled:
            return self.cross_entropy(self.linear(x, weight, bias))
        item = self.half if self.casting else x.item
        before, self.casting = self.casting, False
        given = [self.cast(each, item) for each in (x, weight, bias) if each is not None]
        del x
        loss = self._chunked(given, count, width, choices, item)
        self.casting = before
        return loss

    def _chunked(self, given: list[Tensor], count: int, width: int, choices: int, item: float) -> Tensor:
        wants = [bool(each.node) for each in given]
        formats = [item, 4, 4]  # of the gradients: sums are in fp32
        sums = [
            self.one("zeros_like" if place else "empty_like", [each], each.shape, formats[place])
            if wants[place]
            else None
            for place, each in enumerate(given)
        ]
        at_once = max(1, AT_A_TIME[self.cuda] // choices)
        shares: Tensor | None = None
        slope: Tensor | None = None
        for first in range(0, count, at_once):
            rows = min(at_once, count - first)
            shape, flops = (rows, choices), 2 * rows * width * choices
            part = Tensor((rows, width), item)
            logits = self.one("addmm" if len(given) > 2 else "mm", [part, given[1]], shape, item, flops)
            wide = self.one("_to_copy", [logits], shape, 4) if item == 2 else logits
            made = self.one("_log_softmax", [wide], shape, 4)
            del wide, logits
            shares = made
            del made
            if not any(wants):
                continue
            for name in ("exp_", "scatter_add_", "mul_.Tensor"):
                self.run(name, [shares])
            slope = self.one("_to_copy", [shares], shape, item) if item == 2 else shares
            if wants[0]:
                self.run("mm.out", [part, slope, given[1]], flops=flops)
            if (total := sums[1]) is not None:
                if item == 2:
                    product = self.one("mm", [slope, part], (choices, width), item, flops)
                    self.run("add_.Tensor", [total, product])
                    del product
                else:
                    self.run("addmm_", [total, slope, part], flops=flops)
        loss = self.one("zeros", [], (), 4)
        if any(wants):
            saved = [self.pack(each) for each in sums if each is not None]

            def backward(gradients: list[Tensor], *kept: Tensor) -> list[Tensor | None]:
                found = iter(kept)
                made: list[Tensor | None] = []
                for want in wants:
                    each = next(found) if want else None
                    if each is not None:
                        self.run("mul_.Tensor", [each])
                        each = self.one("_to_copy", [each], each.shape, item) if each.item != item else each
                    made.append(each)
                return made

            self.attach([loss], given, saved, backward)
        return loss
