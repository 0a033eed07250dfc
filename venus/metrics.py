"""Metrics of a run: one JSON line and one console line per step, TensorBoard on request."""

import importlib.util
import json
import math
from pathlib import Path


def _without_non_finite(value, key, found):
    """Return value with NaN and infinities, which JSON lacks, as None; append their dotted keys
    to `found`, in place.
    """
    if isinstance(value, dict):
        return {
            name: _without_non_finite(item, f"{key}.{name}", found) for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _without_non_finite(item, f"{key}.{index}", found) for index, item in enumerate(value)
        ]
    if isinstance(value, float) and not math.isfinite(value):
        found.append(key)
        return None
    return value


def _drop_rows_from(path, start_step):
    """Keep the rows before start_step, atomically: the steps to come would count twice. A
    torn last line goes too.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            if json.loads(line)["step"] < start_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            if number <= text.count("\n"):  # only the last line can be torn
                raise ValueError(
                    f"{path}:{number}: not a metrics row; mend or move the file"
                ) from None
    if "".join(kept) != text:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)


class MetricsLogger:
    """Append one row per step to directory/name; enabled=False (every rank but 0)
    writes and prints nothing.

    start_step: the first step this process runs; rows of it and later ones, left by an interrupted
    run, are dropped (0: all). console: the keys printed, by `write` (tqdm.write keeps a progress
    bar whole). tensorboard: also write event files; ValueError when the package is missing.
    """

    def __init__(
        self,
        directory,
        name="metrics.jsonl",
        *,
        enabled=True,
        start_step=0,
        console=(),
        tensorboard=False,
        write=print,
    ):
        self.console, self.write, self.file, self.tensorboard = tuple(console), write, None, None
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ValueError("tensorboard is asked for and not installed: pip install tensorboard")
        if not enabled:
            return
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_rows_from(path, start_step)
        self.file = path.open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and seldom wanted

            self.tensorboard = SummaryWriter(str(directory), purge_step=start_step)

    def log(self, step, values, *, show=True):
        """Write {step, **values} and, with `show`, print the console's keys. A NaN or infinity is
        null, its key listed under non_finite.
        """
        assert not values.keys() & {"step", "non_finite"}, (
            "step and non_finite are the logger's own keys"
        )
        if self.file is None:
            return
        found = []
        row = {"step": step} | {
            key: _without_non_finite(value, key, found) for key, value in values.items()
        }
        self.file.write(
            json.dumps(row | ({"non_finite": found} if found else {}), allow_nan=False) + "\n"
        )
        self.file.flush()
        shown = {key: values[key] for key in self.console if key in values}
        cells = [
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in shown.items()
        ]
        if show:
            self.write("  ".join([f"step {step}", *cells]))
        if self.tensorboard is not None:
            for key, value in values.items():
                if isinstance(value, int | float):
                    self.tensorboard.add_scalar(key, value, step)

    def close(self):
        """Close the files."""
        for writer in filter(None, (self.file, self.tensorboard)):
            writer.close()
