"""Attention analysis: every stage of scaled dot-product attention, for people and programs.

The functions behind the commands carry the commands' names, take tensors in the place of files,
and know the commands' options as keywords. Importing the package loads none of them, nor torch:
each comes with its first use.

>>> import attncli
>>> result = attncli.compute([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], causal=True)
>>> result.stages["weights"].shape
torch.Size([1, 1, 2, 2])
"""

from importlib import import_module

# As type checkers read it: loading `typing` takes longer than all else here, and what it would
# put off is the handler of signals.
TYPE_CHECKING = False

__version__ = "0.2.0"

# To add a public name, say here which module it lives in, and import it for type checkers below.
_HOMES = {
    "capture": "attncli.api",
    "Capture": "attncli.recording.capture",
    "CapturedGroup": "attncli.recording.recorder",
    "CapturedTensors": "attncli.recording.recorder",
    "recorder": "attncli.api",
    "Recorder": "attncli.recording.recorder",
    "check": "attncli.api",
    "Checked": "attncli.results",
    "compare": "attncli.api",
    "Compared": "attncli.results",
    "compute": "attncli.api",
    "Computed": "attncli.results",
    "StageStatistics": "attncli.attention.stages",
    "entropy": "attncli.api",
    "Entropies": "attncli.results",
    "mask": "attncli.masking",
    "AuditedMask": "attncli.masking",
    "variance": "attncli.api",
    "Audited": "attncli.results",
    "Experiments": "attncli.results",
    "AttentionOptions": "attncli.attention.options",
    "Corner": "attncli.attention.options",
    "Layout": "attncli.attention.options",
    "MaskTrue": "attncli.attention.options",
    "Precision": "attncli.attention.options",
    "Problem": "attncli.attention.problem",
    "make_problem": "attncli.attention.problem",
    "AttncliError": "attncli.errors",
    "CheckFailedError": "attncli.errors",
    "DataError": "attncli.errors",
    "ResourceError": "attncli.errors",
    "UsageError": "attncli.errors",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from attncli.api import capture as capture
    from attncli.api import check as check
    from attncli.api import compare as compare
    from attncli.api import compute as compute
    from attncli.api import entropy as entropy
    from attncli.api import recorder as recorder
    from attncli.api import variance as variance
    from attncli.attention.options import AttentionOptions as AttentionOptions
    from attncli.attention.options import Corner as Corner
    from attncli.attention.options import Layout as Layout
    from attncli.attention.options import MaskTrue as MaskTrue
    from attncli.attention.options import Precision as Precision
    from attncli.attention.problem import Problem as Problem
    from attncli.attention.problem import make_problem as make_problem
    from attncli.attention.stages import StageStatistics as StageStatistics
    from attncli.errors import AttncliError as AttncliError
    from attncli.errors import CheckFailedError as CheckFailedError
    from attncli.errors import DataError as DataError
    from attncli.errors import ResourceError as ResourceError
    from attncli.errors import UsageError as UsageError
    from attncli.masking import AuditedMask as AuditedMask
    from attncli.masking import mask as mask
    from attncli.recording.capture import Capture as Capture
    from attncli.recording.recorder import CapturedGroup as CapturedGroup
    from attncli.recording.recorder import CapturedTensors as CapturedTensors
    from attncli.recording.recorder import Recorder as Recorder
    from attncli.results import Audited as Audited
    from attncli.results import Checked as Checked
    from attncli.results import Compared as Compared
    from attncli.results import Computed as Computed
    from attncli.results import Entropies as Entropies
    from attncli.results import Experiments as Experiments
else:
    # Hidden from type checkers, to which it would make every misspelt name look right.
    def __getattr__(name: str) -> object:
        """Load a public name with its first use (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module 'attncli' has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
