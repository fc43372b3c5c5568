"""The loss and the metrics on held-out data, with the same samples on any number of ranks; and the best so far."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.data.encode import IGNORE_INDEX
from trainkit.data.tokenizer import Encoder
from trainkit.errors import TrainingError
from trainkit.metrics import LOSS, METRICS, is_own, lower_is_better, writes_texts, written_tokens
from trainkit.seeds import derived_seed
from trainkit.trainer.data.sampler import Permutation
from trainkit.trainer.data.source import Batch, Samples, targets_of
from trainkit.trainer.distributed import gather_from_ranks, sum_over_ranks
from trainkit.trainer.metrics.scores import Scores, of_labels, of_own, of_texts, own_metrics, usable_metrics
from trainkit.trainer.metrics.texts import texts_of, writer_of
from trainkit.trainer.models.base import Model
from trainkit.trainer.parallel import STRATEGIES, Strategy
from trainkit.trainer.settings import Settings, World

log = logging.getLogger("trainkit.trainer")
Pass = TypeVar("Pass")  # sample numbers of one forward pass


@dataclass
class _Judged:
    """What this rank's passes have given so far; losses stay on the device, since reading them waits for a pass."""

    losses: list[Tensor] = field(default_factory=list)
    counted: int = 0
    right: list[Tensor] = field(default_factory=list)  # tokens that were the likeliest
    # By pass: predictions and references, label numbers or texts.
    pairs: dict[int, list[tuple[Any, Any]]] = field(default_factory=dict)


class Evaluation:
    """Fixed forward passes over fixed validation samples, chosen by the seed and dealt to the ranks in turn."""

    def __init__(
        self,
        settings: Settings,
        samples: Samples,
        world: World,
        device: torch.device,
        *,
        model: Model,
        encoder: Encoder,
    ) -> None:
        """model: inside the strategy's wrapping. TrainingError for a metric that cannot be computed here."""
        recipe = settings.recipe
        order = Permutation(len(samples), derived_seed(recipe.train.seed, "evaluation"))
        micro = settings.batch.eval_micro
        # Fewer than `eval.batches` passes if the validation split is too small.
        chosen = [order[place] for place in range(min(len(samples), recipe.eval.batches * micro))]
        self.passes = [tuple(chosen[start : start + micro]) for start in range(0, len(chosen), micro)]
        self._samples, self._world, self._device, self._model = samples, world.data, device, model
        self.names = usable_metrics(recipe)
        self._own = own_metrics(self.names)
        self._by_name = [name for name in self.names if not is_own(name)]
        self._best, self._greater = recipe.eval.best_metric, recipe.eval.greater_is_better
        self._writer = None
        if writes_texts(recipe, self.names):
            sharded = STRATEGIES[recipe.strategy.kind].hooks
            tokens = written_tokens(recipe)
            self._writer = writer_of(model, encoder, world, device, tokens=tokens, sharded=sharded)

    @torch.no_grad()
    def measured(
        self, strategy: Strategy, autocast: AbstractContextManager[object], tell: Callable[[], object] = lambda: None
    ) -> Scores:
        """`loss`, the mean over all counted targets of all passes in nats, and each metric by its name.

        tell: called before each pass. The same numbers on every rank, and on any number of ranks.
        """
        strategy.model.eval()
        found = _Judged()
        for place, (numbers, own) in enumerate(in_turn(self.passes, self._world)):
            tell()
            number = place * self._world.size + self._world.rank
            self._judge(strategy, autocast, self._samples[numbers], found if own else _Judged(), number)
        strategy.model.train()
        total = math.fsum(torch.stack(found.losses).tolist()) if found.losses else 0.0
        counted = sum_over_ranks([found.counted], self._world)[0]
        loss = sum_over_ranks([total], self._world)[0] / max(1, counted)
        return {LOSS: loss, **self._metrics(found, loss, counted)}

    def _judge(
        self,
        strategy: Strategy,
        autocast: AbstractContextManager[object],
        batch: Batch,
        found: _Judged,
        number: int,
    ) -> None:
        """One pass. number: of the pass among all. No logits outlive it."""
        model, inputs = self._model, batch.on(self._device)
        truth = targets_of(inputs)
        with autocast:
            if model.labels is not None and truth is not None and self.names:
                logits = strategy.model(**model.shown(inputs)).float()
                pairs = zip(logits.argmax(dim=-1).tolist(), truth.tolist(), strict=True)
                found.pairs[number] = [pair for pair in pairs if pair[1] != IGNORE_INDEX]
                if model.loss_function is None:
                    loss = functional.cross_entropy(logits, truth, ignore_index=IGNORE_INDEX, reduction="sum")
                else:
                    loss = strategy.model(**inputs)
            else:
                loss = strategy.model(**inputs)
                if "accuracy" in self.names and truth is not None:
                    likeliest = strategy.model(**model.shown(inputs)).argmax(dim=-1)
                    found.right.append(((likeliest == truth) & (truth != IGNORE_INDEX)).sum())
            if self._writer is not None:
                # A text without a prompt is no answer to anything.
                texts = [text for text in texts_of(batch.inputs) if len(text.source)]
                written = self._writer.write(texts)
                shown = [self._writer.encoder.decode(text.reference.tolist()) for text in texts]
                found.pairs[number] = [*zip(written, shown, strict=True)]
        found.losses.append(loss.detach().float())
        found.counted += batch.counted

    def _metrics(self, found: _Judged, loss: float, counted: int) -> Scores:
        """The metrics, computed on rank 0 in the order of the passes, for all ranks."""
        if not self.names:
            return {}
        made: Scores = {}
        if "perplexity" in self.names:
            made["perplexity"] = math.exp(loss) if loss < 700 else math.inf
        if found.right or (self._model.labels is None and "accuracy" in self.names):
            right = int(torch.stack(found.right).sum()) if found.right else 0
            made["accuracy"] = sum_over_ranks([right], self._world)[0] / max(1, counted)
        by_rank: list[Mapping[int, Any]] = gather_from_ranks(found.pairs, self._world)
        passes = sorted((number, pairs) for each in by_rank for number, pairs in each.items())
        pairs = [pair for _, several in passes for pair in several]
        computed: Scores | TrainingError = {}
        if self._world.rank == 0:
            try:
                computed = self._of_pairs([given for given, _ in pairs], [wanted for _, wanted in pairs])
            except TrainingError as error:  # to be raised on every rank
                computed = error
        computed = gather_from_ranks(computed, self._world)[0]
        if isinstance(computed, TrainingError):
            raise computed
        made |= computed
        return {name: made[name] for name in (*self._by_name, *made) if name in made}

    def _of_pairs(self, predictions: Sequence[Any], references: Sequence[Any]) -> Scores:
        labels = self._model.labels
        compared = [name for name in self._by_name if {"labels" if labels else "texts"} & {*METRICS[name].of}]
        if not (compared or self._own):
            return {}
        if not predictions:
            what = "labelled sample" if labels else "row with a prompt, or a source, for which a text could be written"
            raise TrainingError(
                f"eval.metrics: the held-out data has no {what}", hint="check data, or set eval.metrics: []"
            )
        if labels is not None:
            found = of_labels(compared, predictions, references, labels=labels)
        else:
            found = of_texts(compared, predictions, references)
        for path, function in self._own.items():
            made = of_own(path, function, predictions, references)
            if twice := [name for name in made if name in (*found, LOSS)]:
                raise TrainingError(
                    f"eval.metrics: {path} names {twice[0]}, which another metric has", hint="rename it"
                )
            found |= made
        return found

    @property
    def writes(self) -> bool:
        """Whether texts are written in an evaluation."""
        return self._writer is not None

    def decisive(self, measured: Scores) -> float:
        """The number by which evaluations are compared. TrainingError where there is no such number."""
        if self._best not in measured:
            what = f"eval.best_metric: an evaluation gives {', '.join(measured)}, and no {self._best}"
            raise TrainingError(what, hint="name one of these")
        return measured[self._best]

    def best(self) -> Best:
        """No evaluation so far."""
        return Best(self._best, lower_is_better(self._best, greater=self._greater))


def in_turn(passes: Sequence[Pass], world: World) -> Iterator[tuple[Pass, bool]]:
    """This rank's passes, dealt in turn, and whether each one counts."""
    for start in range(0, len(passes), world.size):
        # Ranks without a pass repeat the last one uncounted: with sharded weights every rank must take part.
        mine = min(start + world.rank, len(passes) - 1)
        yield passes[mine], mine == start + world.rank


@dataclass(slots=True)
class Best:
    """The best evaluation: the step to keep a checkpoint of, and when to stop early."""

    metric: str = LOSS  # that decides
    lowest: bool = True  # whether the lowest is the best
    value: float | None = None  # None before the first evaluation
    step: int = 0  # of that evaluation
    since: int = 0  # evaluations since then

    def note(self, step: int, value: float) -> bool:
        """Record an evaluation; whether it is the best so far. NaN and infinity never are."""
        old = self.value
        better = math.isfinite(value) and (old is None or (value < old if self.lowest else value > old))
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint's manifest; an empty entry means that nothing was evaluated."""
        known = {"value": data.get("loss"), **data}  # of earlier releases, which compared losses alone
        if known["value"] is not None and known.get("metric", LOSS) != self.metric:
            what = "the best evaluation is sought anew: the checkpoint's was by %s, and eval.best_metric is %s"
            log.warning(what, known.get("metric", LOSS), self.metric)
            return
        self.value, self.step, self.since = known["value"], data.get("step", 0), data.get("since", 0)
