"""What the documents say is so."""

import re
from pathlib import Path

from smp.job import config

ROOT = Path(__file__).resolve().parent.parent


def test_the_readme_names_every_parameter_that_is_not_built():
    text = (ROOT / "README.md").read_text()
    [row] = [line for line in text.splitlines() if line.startswith("| not built yet |")]
    said = set(re.findall(r"`(\w+)(?:=[^`]*)?`", row))

    assert said == {name for name, _, _ in config._NOT_BUILT}
