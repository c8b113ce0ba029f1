"""perseusrun whose ranks have ten minutes to end before they are killed.

New ranks of an elastic job wait as long for others that were started with them. A job that waits
for one of these clocks does not end within the time that a test has, however busy the
machine is: `python patient_perseusrun.py ARGUMENT ...` takes perseusrun's arguments.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from perseus.run import cli
from perseus.run.elastic import cohort
from perseus.run.launch import Job, Launcher


class PatientLauncher(Launcher):
    def __init__(self, job: Job, *arguments: Any) -> None:
        super().__init__(dataclasses.replace(job, grace=600.0), *arguments)


if __name__ == "__main__":
    vars(cli)["Launcher"] = PatientLauncher
    vars(cohort)["_LEAST_SECONDS"] = 600.0
    sys.exit(cli.main())
