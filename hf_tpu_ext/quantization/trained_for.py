"""What a model was trained to be rounded to: a file beside its weights, which are those before rounding."""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from ..atomic_write import write_atomically
from ..errors import UserError
from .fake_quantized import FakeQuantization
from .rounding import Rounding


#: Beside the weights, or the adapter.
QUANTIZATION_FILE = "quantization.json"


@dataclass(frozen=True)
class TrainedFor:
    """
    The settings of quantization-aware training that a rounded model depends on: the fields `qat_...` of
    [`TPUSFTConfig`] of these names.
    """

    weight_dtype: str
    group_size: int = 32
    activation_dtype: str | None = None
    quantize_embedding: bool = False
    adapters: str = "inside"
    scale: str = "max"

    def rounding(self) -> Rounding:
        """How layers round."""
        bits = int(self.weight_dtype.removeprefix("int"))
        return Rounding(bits, self.group_size, self.activation_dtype is not None, scale=self.scale)

    def fake_quantization(self, model: nn.Module) -> FakeQuantization:
        """The fake quantization of a model, which rounds so. Raises `ValueError` where a layer cannot be."""
        return FakeQuantization(model, self.rounding(), self.adapters, self.quantize_embedding)

    def describe(self) -> str:
        """What is rounded how, e.g. `"int4, groups of 32"`."""
        parts = [self.weight_dtype, f"groups of {self.group_size}"]
        if self.scale != "max":
            parts.append(f"scales by {self.scale}")
        if self.activation_dtype is not None:
            parts.append(f"activations in {self.activation_dtype}")
        if self.quantize_embedding:
            parts.append("embeddings too")
        return ", ".join(parts)

    def write(self, directory: str | Path) -> None:
        """Note it beside the weights in a directory, atomically."""
        write_atomically(Path(directory) / QUANTIZATION_FILE, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, directory: str | Path) -> "TrainedFor | None":
        """Read the record in a directory, `None` where there is none. One that cannot be read is a `ValueError`."""
        path = Path(directory) / QUANTIZATION_FILE
        if not path.is_file():
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{path} is damaged. Take another checkpoint, or remove the file to go without it: rm {shlex.quote(str(path))}"
            ) from error
