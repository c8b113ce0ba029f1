"""Makes `import horovod` find Perseus, so that scripts written for Horovod run as they are.

    python -m perseus.compat.horovod train.py ARGUMENTS    under any launcher
    perseusrun --horovod -np 2 python train.py ARGUMENTS   the same
    import perseus.compat.horovod                          in a script, above `import horovod`

Importing this module is the wish for it: an installed Horovod is then not used in this process.
"""

from __future__ import annotations

import sys

from perseus import ddp
from perseus.compat.finder import install
from perseus.compat.program import main_namespace, run

install()
ddp.expect_horovod()

if __name__ == "__main__":
    run(sys.argv[1:], "perseus.compat.horovod")
elif __name__ == "__mp_main__":
    # A worker of multiprocessing: its main module is the script's.
    globals().update(main_namespace(__spec__.name))
