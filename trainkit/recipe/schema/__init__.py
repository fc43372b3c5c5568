"""The recipe's schema, one class a section: validation, JSON Schema, flags and reference text come from here.

No module of it postpones its annotations: pydantic would compile each from its text, a sixth of the time to load them.
"""

from typing import Literal

from trainkit.lazy import without_plugins
from trainkit.recipe.schema.base import Section, section, setting
from trainkit.recipe.schema.cluster import (
    Apptainer,
    Cluster,
    Container,
    Docker,
    Image,
    Kubernetes,
    NoCluster,
    NoContainer,
    Pbs,
    Podman,
    Pyxis,
    Slurm,
    Ssh,
)
from trainkit.recipe.schema.data import Data, DatasetData, RandomData, TargetData, TextData, TokensData
from trainkit.recipe.schema.launching import Devices, Hang, Launcher, Logging, Nodes, Output, Program
from trainkit.recipe.schema.model import GptModel, HfModel, Model, Moe, Peft, Quantize, TargetModel
from trainkit.recipe.schema.strategy import Auto, Ddp, Fsdp, Single, Strategy, StrategyKind, Zero0, Zero1, Zero2, Zero3
from trainkit.recipe.schema.training import (
    Batch,
    Checkpoint,
    Compile,
    Efficiency,
    Eval,
    GradientCheckpointing,
    Optimizer,
    Precision,
    Predict,
    Profile,
    Sample,
    Schedule,
    Train,
)

Zero = Zero1 | Zero2 | Zero3


class Recipe(Section):
    """One training run, described."""

    version: Literal[1] = setting(1, "Version of the recipe language.")
    name: str = setting(
        "run",
        "Name of the run; part of its run directory.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        expects="a name of letters, digits, dots, dashes and underscores (at most 100, a letter or digit first)",
    )
    program: Program = section(Program, "The program that the processes execute.")
    devices: Devices = section(Devices, "Which accelerators the run uses.")
    nodes: Nodes = section(Nodes, "How many machines, and how many processes on each.")
    strategy: Strategy = section(Single, "How the model is spread over ranks.")
    launcher: Launcher = section(Launcher, "Who starts the processes.")
    hang: Hang = section(Hang, "When a run counts as hanging, and what happens then.")
    container: Container = section(NoContainer, "The container image that the launcher and its ranks run in.")
    precision: Precision = section(Precision, "Number formats.")
    batch: Batch = section(Batch, "Samples per optimizer step.")
    efficiency: Efficiency = section(Efficiency, "Techniques that trade memory for speed or the reverse.")
    model: Model = section(GptModel, "The model.")
    peft: Peft = section(Peft, "Adapters that are trained instead of the model's weights.")
    data: Data = section(TextData, "The training data.")
    optimizer: Optimizer = section(Optimizer, "The optimizer.")
    schedule: Schedule = section(Schedule, "The learning-rate schedule.")
    train: Train = section(Train, "The training loop.")
    eval: Eval = section(Eval, "Evaluation on held-out data.")
    predict: Predict = section(Predict, "Predictions for single samples.")
    checkpoint: Checkpoint = section(Checkpoint, "Saving and resuming.")
    logging: Logging = section(Logging, "What is logged, by which rank, and how often.")
    profile: Profile = section(Profile, "Profiling of some steps.")
    sample: Sample = section(Sample, "Text generated at the end of a run.")
    env: dict[str, str | int] = setting(
        {}, "Environment variables for the ranks, as literal values; never secrets.", lines=True
    )
    env_from: list[str] = setting([], "Environment variables passed on from the caller's environment, by name.")
    cluster: Cluster = section(NoCluster, "The scheduler that provides the machines, and the job's options.")
    output: Output = section(Output, "Where runs write their files.")


with without_plugins():
    Recipe.model_rebuild()
