"""The phases that the time of a run is divided into, and the classes that step times are counted in."""

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
#: Classes of step times to a power of ten.
CLASSES_PER_DECADE = 20
