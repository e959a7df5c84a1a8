"""An exception that is no longer needed has to go."""

from __future__ import annotations

from not_yet import CIRCLES, IMPORTS_PUT_OFF, OPTIONS_SPELT
from test_architecture import MODULES, arrows_of, circles, options_spelt, put_off


def test_every_exception_is_needed() -> None:
    found = circles(arrows_of(MODULES))
    idle = [name for name in CIRCLES if not any(m.startswith(name) for c in found for m in c)]
    idle += [m for m in IMPORTS_PUT_OFF if m not in MODULES or not put_off(m, MODULES[m])]
    idle += [m for m in OPTIONS_SPELT if m not in MODULES or not options_spelt(MODULES[m])]
    assert sorted(idle) == []
