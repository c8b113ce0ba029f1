"""The examples for plain torch.distributed, whose only sign of Perseus is the first import."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
import time

import pytest
from ddp_scripts import EXAMPLES, TORCHRUN, read_until, run_script, started
from ranks.elastic import assert_rank_1_was_replaced, run_elastic
from ranks.launch import PARALLEL

pytest.importorskip("torch")

ELASTIC = EXAMPLES / "pytorch_torchrun_elastic.py"
SMALL = ("--no-cuda", "--batch-size", "2", "--image-size", "32", "--num-warmup-batches", "1",
         "--num-batches-per-iter", "1", "--num-iters", "2")  # fmt: skip


OLDER_LAUNCHER = ("-m", "torch.distributed.launch", *TORCHRUN[2:])


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(TORCHRUN, id="run"),
        pytest.param(OLDER_LAUNCHER, id="launch", marks=pytest.mark.full),
    ],
)
def test_the_benchmark_measures_perseus(launcher):
    output = run_script(launcher, EXAMPLES / "pytorch_ddp_benchmark.py", *SMALL)
    assert ", backend perseus" in output
    own, _ = re.findall(r"Img/sec per CPU: ([\d.]+) \+-([\d.]+)", output)[0]
    total, _ = re.findall(r"Total img/sec on 2 CPU\(s\): ([\d.]+) \+-([\d.]+)", output)[0]
    assert 0 < float(own) < float(total)
    assert output.count("Iter #") == 2  # rank 0 alone


def train_alone(folder):
    """The output of one rank, and its loss."""
    output = run_script((*TORCHRUN[:-1], "1"), ELASTIC, str(folder))
    (loss,) = re.findall(r"finished with 1 ranks, loss ([\d.]+)", output)
    return output, float(loss)


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory):
    """The folder of one rank's checkpoint, and its loss."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, train_alone(folder)[1]


@pytest.fixture
def loss_of_one_rank(trained_alone):
    """The batch of a step is the same however many ranks share it: so is the loss."""
    return pytest.approx(trained_alone[1], rel=1e-4)


@pytest.fixture
def agent(tmp_path):
    """Starts another of torchrun's agents, one a host, of a job with this many hosts."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "3",
                "--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-endpoint",
                f"localhost:{port}", "--rdzv-conf", "last_call_timeout=3", "--local-addr",
                "localhost", "--nnodes")  # fmt: skip
    return lambda hosts="1:2", **variables: started(
        (*launcher, hosts), ELASTIC, str(tmp_path), **variables
    )


# A new rank comes in the place of one that has left, too.
FULL = [pytest.param(how, marks=pytest.mark.full) for how in ("early", "between", "killed")]


@pytest.mark.parametrize("how", [*FULL, "tidy", "raises"])
def test_ddp_goes_on_in_the_worlds_of_an_elastic_job(tmp_path, how):
    job = run_elastic(PARALLEL / "programs" / "elastic_ddp.py", tmp_path, how)
    if how == "raises":
        first, second = job.worlds
        assert first == second and job.steps[1] == 3, job.output
    elif how in ("early", "between"):  # nobody has entered a world of three before
        without, (*survivors, new) = job.worlds
        assert without == survivors and new not in survivors, job.output
    else:
        assert_rank_1_was_replaced(job, 3)


def test_a_finished_checkpoint_needs_no_step(trained_alone):
    folder, loss = trained_alone
    output, again = train_alone(folder)
    assert "step 40: 1 ranks" in output
    assert again == loss


def test_torchrun_takes_another_host_and_goes_on(agent, loss_of_one_rank):
    """The first agent starts alone; with the second, ranks start anew from the checkpoint."""
    # Otherwise an agent that stays does not tell a new one where rank 0 is, on gloo neither.
    own_stores = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with agent(**own_stores) as first:
        read_until(first, "step 0: 1 ranks, backend perseus")
        with agent(**own_stores) as second:
            outputs = [first.communicate()[0], second.communicate()[0]]
    both = "".join(outputs)
    assert [first.returncode, second.returncode] == [0, 0], both
    (start,) = re.findall(r"step (\d+): 2 ranks, backend perseus", both)
    assert 0 < int(start) < 40
    (loss,) = re.findall(r"finished with 2 ranks, loss ([\d.]+)", both)
    assert float(loss) == loss_of_one_rank


@pytest.mark.full
def test_torchrun_goes_on_without_a_host_in_the_store_that_it_shares(
    agent, loss_of_one_rank, tmp_path
):
    """torchrun's store still has the keys of the two ranks; on gloo, a restart hangs with them."""
    with agent() as first, agent() as second:  # rank 0, whose host has the store, is the first's
        read_until(first, "step 0: 2 ranks, backend perseus")
        while first.poll() is None and not (tmp_path / "checkpoint").exists():
            time.sleep(0.1)
        second.send_signal(signal.SIGTERM)
        output, _ = first.communicate()
    assert first.returncode == 0, output
    (start,) = re.findall(r"step (\d+): 1 ranks, backend perseus", output)
    assert 0 < int(start) < 40
    (loss,) = re.findall(r"finished with 1 ranks, loss ([\d.]+)", output)
    assert float(loss) == loss_of_one_rank


class Outputs:
    """What several processes print, line by line as it comes."""

    def __init__(self):
        self._lines = []
        self._changed = threading.Condition()
        self._readers = []

    def add(self, process):
        self._readers.append(threading.Thread(target=self._read, args=(process.stdout,)))
        self._readers[-1].start()

    def _read(self, stream):
        for line in stream:
            with self._changed:
                self._lines.append(line)
                self._changed.notify()

    def wait_for(self, pattern):
        """The first of the pattern's groups, in a line that has come or comes."""
        deadline = time.monotonic() + 120
        with self._changed:
            while not (found := re.search(pattern, self.text())):
                assert self._changed.wait(deadline - time.monotonic()), self.text()
        return found[1]

    def text(self):
        return "".join(self._lines)

    def read_to_the_end(self):
        for reader in self._readers:
            reader.join()
        return self.text()


@pytest.mark.full
def test_torchrun_takes_hosts_up_to_the_most_and_goes_on_without_one(agent, loss_of_one_rank):
    """One host, then three, then all four, then three again: each world goes on from the last."""
    own_stores = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    outputs = Outputs()
    with contextlib.ExitStack() as stack:

        def start():
            process = stack.enter_context(agent("1:4", **own_stores))
            outputs.add(process)
            return process

        agents = [start()]
        starts = [outputs.wait_for(r"step (\d+): 1 ranks, backend perseus")]
        agents += [start(), start()]
        starts += [outputs.wait_for(r"step (\d+): 3 ranks, backend perseus")]
        agents += [start()]
        starts += [outputs.wait_for(r"step (\d+): 4 ranks, backend perseus")]
        agents[2].send_signal(signal.SIGTERM)
        loss = outputs.wait_for(r"finished with 3 ranks, loss ([\d.]+)")
        statuses = [process.wait() for process in agents]
        everything = outputs.read_to_the_end()
    assert statuses[:2] == [0, 0] and statuses[3] == 0 and statuses[2] != 0, everything
    assert [int(step) for step in starts] == sorted(int(step) for step in starts), everything
    assert int(starts[0]) == 0 and 0 < int(starts[-1]) < 40, everything
    assert float(loss) == loss_of_one_rank
