"""Objects of a trainer are given what they need: few are given the trainer, and they reach into it in few places."""

import ast
import gc
import inspect
from pathlib import Path

import hf_tpu_ext
from hf_tpu_ext import TPUSFTConfig


ROOT = Path(hf_tpu_ext.__file__).parent
# Numbers that may only fall, but for a new stage of the step (CONTRIBUTING.md).
MOST_REACHES, MOST_MODULES = 72, 6
# They make a trainer of their own, and use it as anybody does.
USERS = ("cli", "doctor")


class Reaches(ast.NodeVisitor):
    """Attributes that a file reads of, or writes to, an object that is called the trainer there, or by an alias of it."""

    def __init__(self, tree: ast.Module):
        self.is_given, self.found = False, []
        self.names, self.attributes = {"trainer"}, {"trainer", "_trainer"}
        known = -1
        while known < len(self.names) + len(self.attributes):
            known = len(self.names) + len(self.attributes)
            for node in ast.walk(tree):
                self.note_alias(node)
        self.visit(tree)

    def note_alias(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = list(zip(targets, values, strict=False))
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, value) for target in targets]
            case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                pairs = [(target, value)]
            case ast.withitem(optional_vars=target, context_expr=value):
                pairs = [(target, value)]
            case _:
                return
        for target, value in pairs:
            if self.is_trainer(value) and isinstance(target, ast.Name):
                self.names.add(target.id)
            elif self.is_trainer(value) and isinstance(target, ast.Attribute):
                self.attributes.add(target.attr)

    def is_trainer(self, node: ast.AST | None) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.names
            case ast.Attribute(attr=name):
                # `trl.trainer` is a module.
                return name in self.attributes and ast.unparse(node) != "trl.trainer"
        return False

    def visit_arg(self, node: ast.arg) -> None:
        of = "" if node.annotation is None else ast.unparse(node.annotation)
        # Of some functions it is the name of a class.
        self.is_given |= of.endswith(("Trainer", "TrainerMixin")) or (
            node.arg == "trainer" and of not in ("str", "type")
        )
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self.is_trainer(node.value):
            self.found.append(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("vars", "getattr", "setattr", "hasattr"):
            self.found += [ast.unparse(node)] * self.is_trainer(node.args[0])
        self.generic_visit(node)


def reaches():
    for file in sorted(ROOT.rglob("*.py")):
        name = file.relative_to(ROOT)
        if name.parts[0] not in USERS:
            found = Reaches(ast.parse(file.read_text(encoding="utf-8")))
            if found.is_given:
                yield str(name), found.found


def test_few_modules_are_given_the_trainer_and_reach_into_it_in_few_places():
    found = dict(reaches())
    assert len(found) <= MOST_MODULES, sorted(found)
    assert sum(map(len, found.values())) <= MOST_REACHES, {name: len(of_file) for name, of_file in found.items()}
    assert not [f"{name}: {each}" for name, of_file in found.items() for each in of_file if each.startswith("_")]


def test_the_count_sees_aliases():
    text = """
class Steps:
    def __init__(self, trainer):
        self._owner, self._model = trainer, trainer.model

    def run(self):
        owner = self._owner
        if (again := owner) is not None:
            again._private, getattr(again, "args"), trl.trainer.utils
        return owner.state.global_step
"""
    found = Reaches(ast.parse(text))
    assert found.is_given
    assert found.found == ["model", "_private", "getattr(again, 'args')", "state"]


def test_the_objects_that_hold_a_trainer_are_those(runs):
    """Whatever they call it."""
    trainer = runs.ours(train=False, config_cls=TPUSFTConfig, predict_with_generate=True, eval_strategy="steps")
    holding = {
        Path(inspect.getfile(type(each))).relative_to(ROOT).as_posix()
        for each in gc.get_objects()
        if type(each).__module__.startswith(f"{hf_tpu_ext.__name__}.") and type(each).__dictoffset__
        if any(value is trainer for value in vars(each).values())
    }
    assert holding <= set(dict(reaches()))
    assert "trainers/run/programs.py" in holding
