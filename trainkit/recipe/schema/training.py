"""Recipe sections that say what is trained and how: precision, batch, optimizer, schedule, loop, …"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from trainkit.metrics import LOSS, METRICS
from trainkit.optimizers import OPTIMIZERS
from trainkit.recipe.schema.base import MOST, Count, ImportPath, Section, section, setting
from trainkit.recipe.schema.launching import Scalar

if TYPE_CHECKING:
    # The registries are the only lists of names, and type checkers cannot evaluate them.
    OptimizerName = str
    MetricName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    MetricName = Literal[tuple(METRICS)]


# How often; below 1 a share of all steps, as HF's eval_steps and save_steps.
Steps = Annotated[int, Field(ge=0, le=MOST)] | Annotated[float, Field(gt=0, lt=1)]


class Precision(Section):
    """Number formats. `precision: bf16` is short for `precision: {dtype: bf16}`."""

    short_form: ClassVar[str] = "dtype"

    dtype: Literal["auto", "fp32", "fp16", "bf16"] = setting(
        "fp32",
        "Format of the forward and backward computation. `fp32` is single precision throughout; `fp16` is 16 bits with "
        "loss scaling, for GPUs with tensor cores before Ampere; `bf16` is 16 bits without loss scaling, for Ampere "
        "and later; `auto` is bf16 if every GPU has units for it, else fp16 if every GPU has tensor cores, "
        "else fp32.",
    )
    weights: Literal["fp32", "bf16"] = setting(
        "fp32",
        "Format of weights, gradients and optimizer state; `bf16` takes half the memory and rounds "
        "small updates away, unless optimizer.name is `adamw_anyprecision`.",
    )
    tf32: bool | None = setting(
        None, "TensorFloat-32 matrix products and convolutions on CUDA; null leaves PyTorch's default.", flag="tf32"
    )
    eval: Literal["same", "fp32", "fp16", "bf16"] = setting("same", "Format for evaluation.")


class Batch(Section):
    """Samples per optimizer step. `global` = `micro` x `accumulation` x data-parallel ranks; any two give the third."""

    global_: Literal["auto"] | Count = setting(
        "auto", "Samples per optimizer step over all ranks.", unit="samples", alias="global"
    )
    micro: Literal["auto"] | Count | None = setting(
        None,
        "Samples per rank in one forward pass; null follows from the other two, or is at most 8 (your own program "
        "keeps its own); `auto` searches at the start for the largest that fits in memory, if `global` is set and "
        "`accumulation` is not.",
        unit="samples",
        flag="per_device_train_batch_size",
    )
    memory_mib: Count | None = setting(
        None,
        "Memory limit of each rank for the search of `micro: auto`: the allocator's on CUDA, resident on "
        "a CPU; null is the memory in use plus nine tenths of the free memory.",
        unit="MiB",
    )
    accumulation: Literal["auto"] | Count = setting(
        "auto", "Forward and backward passes per optimizer step.", flag="gradient_accumulation_steps"
    )
    eval_micro: Literal["auto"] | Count = setting(
        "auto",
        "Samples per rank in one evaluation pass; `auto` is `micro`, or at most 8 while that is unknown.",
        unit="samples",
        flag="per_device_eval_batch_size",
    )

    def _contradictions(self) -> Iterator[str]:
        if self.memory_mib is not None and self.micro != "auto":
            yield "memory_mib limits the search of micro: auto, and micro is not auto"


class Compile(Section):
    """torch.compile. `compile: true` is short for `compile: {enabled: true}`."""

    short_form: ClassVar[str] = "enabled"

    enabled: bool = setting(False, "Compile the model.", flag="torch_compile")
    backend: str = setting("inductor", "A backend that the installed torch lists.", flag="torch_compile_backend")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = setting(
        "default", "How much compile time to spend for speed, with the backend `inductor`.", flag="torch_compile_mode"
    )
    dynamic: bool | None = setting(
        None, "Whether sizes may change without recompilation; null lets torch decide when it compiles a second time."
    )
    scope: Literal["auto", "model", "blocks"] = setting(
        "auto",
        "`blocks` compiles the code of a transformer block, once for all equal ones, so that compile time does not "
        "grow with depth; `model` the whole model in one graph; `auto` is `blocks`, or `model` where there are none, "
        "and with CUDA graphs.",
    )


class GradientCheckpointing(Section):
    """Activation checkpointing. `gradient_checkpointing: true` is short for `gradient_checkpointing: {every: true}`."""

    short_form: ClassVar[str] = "every"

    every: bool | Count = setting(
        False, "Which blocks recompute their activations in backward: `true` all, `n` every n-th, `false` none."
    )
    selective: bool = setting(
        False,
        "Keep the results of matrix products and attention, and recompute the rest: saves most of the "
        "memory, in less time.",
    )

    def _contradictions(self) -> Iterator[str]:
        if self.selective and not self.every:
            yield "selective: true applies within the blocks that every selects, and every is false"


class Efficiency(Section):
    """Techniques that trade memory for speed or the reverse."""

    gradient_checkpointing: GradientCheckpointing = section(
        GradientCheckpointing, "Recompute block activations in backward: less memory, about a quarter more time."
    )
    compile: Compile = section(Compile, "torch.compile.")
    offload_activations: bool = setting(
        False,
        "Let what blocks keep for backward wait in the machine's memory, on CUDA; with gradient checkpointing that is "
        "the input of each block.",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = setting(
        "auto",
        "`sdpa` is torch's fused scaled-dot-product attention, `eager` the unfused one, `flash_attention_2` is "
        "the package flash-attn's, for models of transformers on CUDA; `auto` is `sdpa` if the model supports it.",
    )


class Optimizer(Section):
    """The optimizer. Biases, norms and other one-dimensional parameters are not decayed."""

    name: OptimizerName | ImportPath = setting(
        "adamw_torch",
        "Optimizer: a name, or any class by its import path `pkg.mod:Class`, created as Class(groups, lr=lr, **args).",
        flag="optim",
        expects="an import path pkg.mod:Class",
    )
    args: dict[str, Scalar | list[Scalar]] = setting({}, "Further arguments of the optimizer's class, by name.")
    # Weight decay, betas, eps and the floor of the schedule are those of GPT-3 (arXiv:2005.14165, appendix B).
    lr: float = setting(3e-4, "Peak learning rate.", ge=0, flag="learning_rate")
    weight_decay: float = setting(
        0.1,
        "Weight decay of matrices, decoupled from the gradient; `sgd` and `adagrad` add it to the gradient.",
        ge=0,
        flag="weight_decay",
    )
    beta1: float = setting(0.9, "Decay of AdamW's first moment; momentum of `sgd`.", ge=0, lt=1, flag="adam_beta1")
    beta2: float = setting(0.95, "Decay of AdamW's second moment.", ge=0, lt=1, flag="adam_beta2")
    eps: float = setting(1e-8, "Added to the denominator (AdamW, `adagrad`).", gt=0, flag="adam_epsilon")


class Schedule(Section):
    """The learning-rate schedule."""

    name: Literal["cosine", "linear", "constant", "constant_with_warmup", "wsd"] = setting(
        "cosine",
        "Shape after warm-up; `constant` has no warm-up. `wsd` is warm-up, stable, decay (arXiv:2404.06395): the peak "
        "is held, and the rate falls in the last `decay_steps` alone.",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=MOST)] | Annotated[float, Field(gt=0, lt=1)] = setting(
        0,
        "Steps of linear warm-up; a number below 1 is a share of all steps, rounded up.",
        unit="steps",
        flag="warmup_steps",
    )
    # a tenth of the steps: MiniCPM (arXiv:2404.06395, section 4); more steps gain little (arXiv:2405.18392, section 3)
    decay_steps: Annotated[int, Field(ge=1, le=MOST)] | Annotated[float, Field(gt=0, lt=1)] = setting(
        0.1, "Steps of the decay of `wsd`; a number below 1 is a share of all steps, rounded up.", unit="steps"
    )
    decay_type: Literal["linear", "cosine", "sqrt"] = setting(
        "linear", "Shape of the decay of `wsd`; `sqrt` is 1 - sqrt (arXiv:2405.18392)."
    )
    min_lr_ratio: float = setting(0.1, "Final learning rate over the peak.", ge=0, le=1)
    from_zero: bool = setting(
        False,
        "Whether steps are counted from 0, as in transformers and PyTorch: the first step of a warm-up has the rate 0, "
        "and the last step of all the one before the final rate. `false`: neither wastes a step.",
    )


class Train(Section):
    """The training loop."""

    loss: ImportPath | None = setting(
        None,
        "Your own loss, `pkg.mod:name`, called as name(outputs, inputs) with the model's outputs and the "
        "batch as a mapping by name; it returns one number. null is the model's own loss.",
        expects="an import path pkg.mod:name",
    )
    loss_reduction: Literal["mean", "sum"] = setting(
        "mean",
        "Whether that number, or the one that your own model returns, is the mean or the sum over the counted "
        "targets of the "
        "batch: `targets` or `labels` that are not -100, or without either the samples.",
    )
    steps: Annotated[int, Field(ge=0, le=MOST)] | None = setting(
        None,
        "Optimizer steps; overrides `epochs`; 0 only evaluates the resumed checkpoint, or the untrained model.",
        unit="steps",
        flag="max_steps",
    )
    epochs: Annotated[float, Field(gt=0, le=MOST)] | None = setting(
        None, "Passes over the data; the built-in trainer needs `steps` or `epochs`.", flag="num_train_epochs"
    )
    seed: int = setting(0, "Seed of weights, data order and dropout.", ge=0, lt=2**63, flag="seed")
    max_grad_norm: float = setting(
        1.0, "Gradients are clipped to this norm; 0 disables clipping.", ge=0, flag="max_grad_norm"
    )
    deterministic: bool = setting(
        False,
        "Bit-equal runs on the same machine, even on CUDA, where runs are otherwise equal up to rounding: "
        "deterministic algorithms only, including inductor's, and an error for an operation without one.",
        flag="full_determinism",
    )


class Eval(Section):
    """Evaluation on held-out data."""

    every_steps: Steps = setting(
        0,
        "Evaluate every so many steps and at the end; a number below 1 is a share of all steps, rounded up; 0 is "
        "never.",
        unit="steps",
        flag="eval_steps",
    )
    batches: Count = setting(
        20,
        "Evaluation passes of `eval_micro` samples, divided among the ranks: the same samples on any number of ranks.",
    )
    metrics: list[MetricName | ImportPath] | None = setting(
        None,
        "What is measured beside the loss: names, and functions of your own by their import path `pkg.mod:name`, "
        "called as name(predictions, references) with two lists, of label numbers or of texts; they return a number, "
        "or a mapping of names to numbers. null is accuracy and f1 for a classifier, chrf of written texts for "
        "seq2seq_lm, perplexity for other language models; [] is the loss alone.",
        expects="an import path pkg.mod:name",
    )
    tokens: Count | None = setting(
        None,
        "Most tokens that are written for each held-out source or prompt, for metrics of texts; null is "
        "`data.target_length`, or 128 for task causal_lm.",
        unit="tokens",
    )
    best_metric: str = setting(
        LOSS,
        "What decides which evaluation is the best, for `patience`, `checkpoint.keep_best` and `--best`: `loss`, one "
        "of `metrics`, or a name that a function of your own returns.",
        min_length=1,
    )
    greater_is_better: bool | None = setting(
        None,
        "Whether the highest `best_metric` is the best; null is known of loss and of each name, and true otherwise.",
        flag="greater_is_better",
    )
    patience: int = setting(
        0,
        "Early stopping after so many evaluations in a row without a new best; 0 is never.",
        unit="evaluations",
        ge=0,
        flag="early_stopping_patience",
    )


class Predict(Section):
    """Predictions for single samples. `predict: all` is short for `predict: {split: all}`."""

    short_form: ClassVar[str] = "split"

    split: Literal["none", "validation", "train", "all"] = setting(
        "none",
        "Samples for which the run writes source, reference and prediction to predictions.jsonl at its end, with the "
        "probabilities of all labels, or the loss.",
    )
    tokens: Annotated[int, Field(ge=0, le=MOST)] | None = setting(
        None,
        "Most tokens that a model of transformers for seq2seq_lm or causal_lm writes as its prediction for each source "
        "or prompt of data.kind dataset: the likeliest, or by beams if the generation_config.json of its folder says "
        "so. null is as for `eval.tokens`; 0 writes nothing.",
        unit="tokens",
    )


# A path, or one address of fsspec's: chains (`simplecache::s3://…`) are for reading, and what follows `?` or `#`
# may be a signature.
ADDRESS = r"^(\w[\w+.-]*://([^?#:]|:[^?#:])+|[^?#:]+)$"


class PushToHub(Section):
    """Upload to the Hugging Face Hub. `push_to_hub: owner/name` is short for `push_to_hub: {repo: owner/name}`."""

    short_form: ClassVar[str] = "repo"

    repo: str | None = setting(
        None,
        "Model repository `owner/name` that the run uploads to, and creates if necessary; null uploads "
        "nothing. The token is that of HF_TOKEN, or of `hf auth login`.",
        flag="hub_model_id",
    )
    strategy: Literal["end", "every_save", "checkpoint", "all"] = setting(
        "end",
        "`end`: the final weights; `every_save`: the weights of each checkpoint; `checkpoint`: also "
        "the newest checkpoint, to resume from, as last-checkpoint; `all`: also every checkpoint.",
        flag="hub_strategy",
    )
    private: bool | None = setting(
        None,
        "Whether only its owner can see the repository; null is the owner's default.",
        flag="hub_private_repo",
    )


class Checkpoint(Section):
    """Saving and resuming."""

    at_end: bool = setting(
        True, "Save when the run ends: at its last step, when it stops early, and when it is stopped by a signal."
    )
    every_steps: Steps = setting(
        0,
        "Save every so many steps, and at the end; a number below 1 is a share of all steps, rounded up; 0 is at the "
        "end alone, by `at_end`, and on SIGUSR1.",
        unit="steps",
        flag="save_steps",
    )
    keep: int = setting(2, "How many of the newest checkpoints to keep; 0 keeps all.", ge=0, flag="save_total_limit")
    keep_best: bool = setting(
        False,
        "Save whenever an evaluation is the best so far (`eval.best_metric`), and keep that checkpoint in addition to "
        "the newest.",
    )
    asynchronous: bool | None = setting(
        None,
        "Write checkpoints in the background from a copy in the machine's memory: training waits for the copy only. "
        "null: where the free memory holds the copies.",
    )
    resume: str = setting(
        "never",
        "`never`; `auto`: the newest complete checkpoint of an earlier run of this name with the same training "
        "settings; or a path: with other training settings the plan warns, and the run continues from its step with "
        "its weights and optimizer state and the recipe's settings.",
        flag="resume_from_checkpoint",
        reads="folder",
        missing="set it to auto, which takes the newest matching checkpoint",
        words=("never", "auto"),
        min_length=1,
    )
    copy_to: str | None = setting(
        None,
        "Folder elsewhere that gets a copy of each checkpoint, in the background: an address that fsspec can write to "
        "(`s3://bucket/path`, `gs://…`, `abfs://…`) or a path; null copies nothing. `resume: auto` looks there, too. "
        "Credentials come from the environment.",
        pattern=ADDRESS,
        expects="a path, or an address `scheme://…` without `?`, `#` and `::`",
    )
    push_to_hub: PushToHub = section(PushToHub, "Upload to the Hugging Face Hub, during training.")


class Profile(Section):
    """Profiling of some steps. `profile: 3` is short for `profile: {steps: 3}`."""

    short_form: ClassVar[str] = "steps"

    steps: int = setting(
        0,
        "Steps that rank 0 profiles with torch.profiler: time by groups of operators in the summary, and a trace file; "
        "0 for none. The profiled steps are slower.",
        unit="steps",
        ge=0,
    )
    after: Count = setting(
        2, "Steps before the first profiled one; the last of them starts the profiler.", unit="steps"
    )


class Sample(Section):
    """Text generated at the end of a run."""

    prompt: str = setting("", "Text to continue; empty generates nothing.", lines=True)
    tokens: Count = setting(200, "Tokens to generate.", unit="tokens")
    temperature: float = setting(0.8, "Sampling temperature.", gt=0)
