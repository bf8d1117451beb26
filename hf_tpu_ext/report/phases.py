"""The phases that the time of a run is divided into, and the classes that step times are counted in."""

import math


#: All phases, in the order of logs, with what the host does in them.
PHASES = {
    "data": "takes the next batches from the data loader",
    "rollout": "generates completions, and has them scored and rewarded",
    "trace": "traces the step and launches the graph",
    "replay": "launches the compiled graph by its handle",
    "step": "runs the operators of the step, or on a GPU launches them",
    "device": "waits for the device before a log",
    "read": "fetches what is logged",
    "log": "hands logs to report_to and to the screen",
    "other": "the rest: callbacks and the loop itself",
    "compile": "compiles graphs, or loads them from the compilation cache",
    "eval": "evaluates",
    "save": "writes checkpoints",
}
#: Phases that are not part of a step: what a step takes is the rest.
BESIDES_STEPS = ("compile", "eval", "save")
#: Classes to a power of ten.
CLASSES_PER_DECADE = 20


def class_of(seconds: float) -> int:
    """
    The class that a time above 0 is counted in: `class_of(s)` is `k` if `s` is at least `10 ** (k /
    CLASSES_PER_DECADE)` seconds, and less than that of `k + 1`.
    """
    return math.floor(CLASSES_PER_DECADE * math.log10(seconds))
