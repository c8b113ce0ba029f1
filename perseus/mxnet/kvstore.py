"""The KVStore `dist_sync_perseus`: MXNet's store of synchronous training, without servers.

Every rank holds every value. A push is an allreduce; with an optimizer, each rank runs the same
update on the same numbers. No method waits for the data unless it says so: pushes, updates and
pulls are ops that MXNet's engine runs in order. Belongs to the thread that trains.

Source of the interface: MXNet 1.9, mxnet.kvstore.KVStore.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import mxnet as mx
import numpy as np

from perseus import basics, control
from perseus.gradients.outcome import Outcome
from perseus.gradients.scopes import Scope
from perseus.mxnet import ops, residuals, sparse
from perseus.mxnet.gradient_compression import compressor_of
from perseus.mxnet.kvstore_arguments import (
    Key,
    PerseusOp,
    alike,
    check_pushed,
    check_shape,
    checked_op,
    pairs,
    share_arrays,
    single_pairs,
    with_rows,
)
from perseus.mxnet.kvstore_reducer import StoreReducer, settle
from perseus.mxnet.kvstore_start import check_start
from perseus.mxnet.kvstore_step import Step, Updater
from perseus.mxnet.kvstore_value import (
    Value,
    can_be_averaged,
    check_is_in_use,
    check_weight_is_known,
    replace_weight,
    weight_of,
)
from perseus.mxnet.learning_rate import learning_rate
from perseus.mxnet.optimizer import unwrapped
from perseus.mxnet.parameter_check import WeightsByKey
from perseus.mxnet.store_names import SPELLINGS, TYPE, check_names
from perseus.mxnet.weight_turns import WeightTurnsByKey
from perseus.process_sets import global_process_set
from perseus.worlds import outlives_worlds


class KVStore(mx.kvstore.KVStore):  # type: ignore[misc] # MXNet has no types
    """See the module. Creating one calls hvd.init(), if that was not done.

    Arguments of several methods: key is an int or a string (one kind in a store), or a list; value
    and out are an NDArray, a list of them for several devices, or, with a list of keys, a list of
    either. priority: higher goes first.

    Keys, shapes, dtypes, the order of `init`, and the order in which stores are used first are the
    same on all ranks.
    ValueError or TypeError says what is wrong with an argument. If ranks disagree, or one has died,
    the next wait for an array raises MXNetError.
    """

    def __init__(self) -> None:  # not super's, which creates a store of MXNet's own
        if not basics.is_initialized():
            basics.init()
        self._updater: Updater | None = None
        self._values: dict[Key, Value] = {}
        self._scope = Scope("kvstore", global_process_set)
        self._reducer = StoreReducer(self._scope)
        self._step = Step()
        self._weights = WeightsByKey()
        self._turns = self._new_turns()
        outlives_worlds(self)

    def begin_world(self) -> None:
        """See Lasting. No rank goes on with a step of the last world."""
        self._step.begin()
        self._reducer.begin_world()

    def __del__(self) -> None:
        """There is nothing of MXNet's to free."""

    @property
    def type(self) -> str:
        """`dist_sync_perseus`: Module multiplies its batch size by num_workers for such names."""
        return TYPE

    @property
    def rank(self) -> int:
        """This process's number."""
        return basics.rank()

    @property
    def num_workers(self) -> int:
        """How many ranks there are."""
        return basics.size()

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host, and the number of its device."""
        return basics.local_rank()

    def is_capable(self, capability: str) -> bool:
        """True for "optimizer": updates may run in the store. ValueError for anything else."""
        if capability.lower() == self.OPTIMIZER:
            return True
        raise ValueError(f"[kvstore] unknown capability {capability!r}: there is 'optimizer'")

    # ---- values

    def init(self, key: Any, value: Any, param_only: bool = False) -> None:
        """Store rank 0's `value` under a key; the array itself is not changed.

        param_only: the value is no parameter with gradients; its pushes are never compressed and
            never run the updater.
        Waits for row-sparse values, and for others with MXNET_UPDATE_ON_KVSTORE=0. A second call
        for a key replaces the value and waits for pushes. Sums over steps, residuals and a float32
        copy do not outlast the value; the optimizer's other states do, if they fit. Collective.
        """
        for each, array in single_pairs(key, value):
            self._init(each, array, bool(param_only))
            if not param_only and self._updater is None:
                check_start(each, array, self._values[each].array, self._scope.prefix())

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull`."""
        for each, array in single_pairs(key, value):
            self._init(each, array, param_only=False)
        for each, outs in pairs(key, out):
            self._values[each].given_to = outs
        self.pull(key, out, priority, ignore_sparse=False)

    def push(self, key: Any, value: Any, priority: int = 0, op: int = PerseusOp.Sum) -> None:
        """Combine the values of all devices and ranks: Sum, never averaged, Max or Min.

        With an updater or optimizer, the sum is the gradient that it updates what the store holds
        with. Otherwise, and with param_only, the result is what the store holds then. Gradients
        travel between hosts as the settings or set_gradient_compression say.

        Pushes of row-sparse arrays wait, and so do those of gradients with
        PERSEUS_ACCUMULATE_N_STEPS or PERSEUS_ALLREDUCE_NANCHECK_ACTION=skip, key by key.
        """
        if isinstance(priority, PerseusOp):  # a third argument can mean nothing else
            priority, op = 0, priority
        combine = checked_op(op)
        for each, given in pairs(key, value):
            with mx.autograd.pause():
                self._push(each, given, priority, combine)

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Copy the stored value to each of `out`.

        ignore_sparse: leave row-sparse values that an optimizer updates to row_sparse_pull.
        """
        for each, outs in pairs(key, out):
            held = self._held_here(each, "pull")
            self._check_is_in_use(each, held, outs)
            for array in outs:
                check_shape(each, array, held.array, "pull")
                updated = self._updater is not None and not held.param_only
                if array.stype == "default" or not (ignore_sparse and updated):
                    self._step.give(each, partial(sparse.copy, held.array, array.as_nd_ndarray()))
                    held.is_pulled_to(array)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out`, or to `value` itself.

        If no optimizer updates the value, `value` is one array that no other key has as well, and
        out is None, the sum is computed in place. The store then has no copy of it, and nothing to
        pull until the next `push`.
        """
        if out is None and share_arrays(pairs(key, value)):
            out = value  # all keys are pushed before one of their results replaces what others push
        if out is not None:
            for each, outs in pairs(key, out):
                self._check_is_in_use(each, self._held(each, "pushpull"), outs)
            self.push(key, value, priority)
            self.pull(key, out, priority, ignore_sparse=False)
            return
        for each, given in pairs(key, value):
            held = self._held(each, "pushpull")
            in_place = len(given) == 1 and alike(given[0], held.array)
            in_place = in_place and (held.param_only or self._updater is None)
            with mx.autograd.pause():
                self._push(each, given, priority, PerseusOp.Sum, in_place)
            if not held.is_given_out:
                self.pull(each, given, priority, ignore_sparse=False)

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> None:
        """Copy some rows of the stored value to RowSparseNDArrays, which then have only those.

        row_ids: an NDArray of row numbers in any order, repeated or not, or a list with one for
            each of `out`. Blocks.
        """
        if row_ids is None:
            raise ValueError("[kvstore] row_sparse_pull needs row_ids")
        for each, array, rows in with_rows(key, out, row_ids):
            held = self._held_here(each, "row_sparse_pull").array
            check_shape(each, array, held, "row_sparse_pull")
            if array.stype != "row_sparse":
                raise ValueError(f"[kvstore] row_sparse_pull of {each!r}: out is not row-sparse")
            wanted = np.unique(rows.asnumpy()).astype(np.int64)
            if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < held.shape[0]:
                raise ValueError(
                    f"[kvstore] row_sparse_pull of {each!r}: the value has rows 0 to "
                    f"{held.shape[0] - 1}, row_ids are from {wanted[0]} to {wanted[-1]}"
                )
            self._step.give(each, partial(sparse.copy_rows, held, wanted, array))

    # ---- updates

    def set_optimizer(self, optimizer: Any) -> None:
        """Have this optimizer update the stored values with pushed gradients, on every rank.

        Sums are not divided by the number of ranks; rescale_grad does that. Module sets it by
        num_workers; a Trainer's step() takes the batch of all ranks together.

        A DistributedOptimizer is unwrapped, with a warning: the store has reduced the gradients.
        """
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise ValueError(
                f"[kvstore] set_optimizer expected an mx.optimizer.Optimizer, got {optimizer!r}; "
                f"write, for example, mx.optimizer.create('sgd', learning_rate=0.01)"
            )
        optimizer = unwrapped(optimizer, "KVStore")
        self._set_updater(mx.optimizer.get_updater(optimizer))

    def _set_updater(self, updater: Updater | None) -> None:
        """Have updater(key, sum, stored) change `stored` in place at every push."""
        self._turns.finish()
        self._updater = updater
        self._turns = self._new_turns()

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's states, which are the same on every rank, to a file.

        dump_optimizer: also write the optimizer. Several ranks may write the same file, which then
        has the last one's residuals. Waits. ValueError without set_optimizer.
        """
        states = self._states("save").get_states(dump_optimizer)
        self._wait()
        residuals.write(Path(fname), states, self._reducer.residuals.read())

    def load_optimizer_states(self, fname: str) -> None:
        """Read such a file, or one of MXNet's, on every rank. ValueError without set_optimizer.

        The residuals become those that this rank wrote there, or none. What rotate would still
        correct is dropped.
        """
        updater = self._states("load")
        content = Path(fname).read_bytes()
        held = residuals.held_in(content)
        self._turns.drop()
        updater.set_states(content)
        self._wait()
        self._reducer.forget()
        self._reducer.residuals.replace(held)

    def set_gradient_compression(self, compression_params: dict[str, Any]) -> None:
        """Set the encoding of gradients between hosts; the same on all ranks.

        For the dictionary and its errors see gradient_compression.compressor_of. ValueError for
        rotate with PERSEUS_PARAMETER_CHECK_N_STEPS.
        """
        compression = compressor_of(compression_params)
        self._turns.finish()
        self._reducer.encode_by(compression)
        self._turns = self._new_turns()

    # ---- ranks

    def barrier(self) -> None:
        """Return once every rank is here."""
        control.barrier()

    _barrier = barrier

    def _send_command_to_servers(self, head: int, body: str) -> NoReturn:
        raise NotImplementedError("[kvstore] dist_sync_perseus has no servers to send commands to")

    # ---- how

    def _states(self, what: str) -> Any:
        if not hasattr(self._updater, "set_states"):
            raise ValueError(f"[kvstore] no optimizer's states to {what}: call set_optimizer first")
        return self._updater

    def _new_turns(self) -> WeightTurnsByKey:
        # Without a reference to the store: it ends with its last reference.
        find = partial(weight_of, self._values, self._updater)
        return WeightTurnsByKey(self._reducer.plan, "kvstore", find)

    def _wait(self) -> None:
        """Wait until nothing is under way."""
        for held in self._values.values():
            for array in (held.array, held.pushed):
                if array is not None:
                    array.wait_to_read()

    def _init(self, key: Key, value: Any, param_only: bool) -> None:
        if any(isinstance(key, str) != isinstance(other, str) for other in self._values):
            raise ValueError(f"[kvstore] init of {key!r}: keys are either all ints or all strings")
        if value.stype not in ("default", "row_sparse"):
            raise ValueError(f"[kvstore] init of {key!r}: {value.stype} arrays are not served")
        old = self._values.get(key)
        if old is not None:
            self._end(key, old)
        with mx.autograd.pause():
            held = sparse.as_stored(value.as_nd_ndarray(), "default").copyto(mx.cpu())
            ops.broadcast([held], [held], 0, f"{self._scope.prefix()}.init.{key}")
            if value.stype == "row_sparse":
                held = sparse.from_rows(held, np.arange(len(held)), value)
            if old is not None and isinstance(self._updater, mx.optimizer.Updater):
                replace_weight(self._updater, key, old.array, held)
        given_before = () if old is None else old.given_to
        self._values[key] = Value(held, param_only, given_before=given_before)

    def _end(self, key: Key, old: Value) -> None:
        """Wait for all that is under way with a value, and drop what is kept of its gradients."""
        self._turns.finish()
        self._step.begin()
        for array in (old.array, old.pushed, old.reduced):
            if array is not None:
                settle(array)
        self._reducer.begin_anew(str(key))

    def _check_is_in_use(self, key: Key, held: Value, outs: list[Any]) -> None:
        if self._updater is not None and not held.param_only:
            check_is_in_use(key, held, outs)

    def _held(self, key: Key, what: str) -> Value:
        if key not in self._values:
            raise ValueError(f"[kvstore] {what} of {key!r}, which was not initialised: call init")
        return self._values[key]

    def _held_here(self, key: Key, what: str) -> Value:
        held = self._held(key, what)
        if held.is_given_out:
            raise ValueError(
                f"[kvstore] {what} of {key!r}, whose last sum pushpull has made in the array that "
                f"it was given and nowhere else: use push(key, array), then pull(key, out)"
            )
        return held

    def _push(
        self, key: Key, given: list[Any], priority: int, op: PerseusOp, in_place: bool = False
    ) -> None:
        held = self._held(key, "push")
        check_pushed(key, given, held.array, op)
        updater = None if held.param_only else self._updater
        if updater is not None and op != PerseusOp.Sum:
            raise ValueError(
                f"[kvstore] push of {key!r} with op={op.name}: the optimizer needs sums; "
                f"init(…, param_only=True) is for what it is not to update"
            )
        gradient = op == PerseusOp.Sum and not held.param_only
        if gradient and updater is None and basics.may_withhold_gradients():
            raise ValueError(
                f"[kvstore] push of {key!r}: with PERSEUS_ACCUMULATE_N_STEPS, and with "
                f"PERSEUS_ALLREDUCE_NANCHECK_ACTION=skip, not every gradient is to be applied, so "
                f"that the store must do it: set_optimizer, Trainer(update_on_kvstore=True), no "
                f"MXNET_UPDATE_ON_KVSTORE=0; init(…, param_only=True) for what is no gradient"
            )
        weights = held.given_to if updater is None else [held.array]
        if gradient and weights:
            self._weights.update(key, weights[0])
        rotates = gradient and self._turns.rotation() is not None
        takes_turn = rotates and can_be_averaged(held, given)
        if takes_turn and updater is None:
            check_weight_is_known(key, held)
        held.is_given_out = in_place
        if any(array.stype != "default" for array in given):
            result, outcome = self._reducer.add_rows(
                given, str(key), priority=priority, gradient=gradient
            )
            if updater is None:
                sparse.copy(result, held.array)
        else:
            if updater is not None and held.pushed is None:
                held.pushed = ops.empty(held.array)
            result = held.array if updater is None else held.pushed
            if held.is_given_out:
                (result,) = given
            if held.reduced is not None and held.reduced is not result:
                settle(held.reduced)
            held.reduced = result
            outcome = self._reducer.combine(
                given, result, str(key), op=op, priority=priority, gradient=gradient,
                rate=learning_rate(getattr(updater, "optimizer", None), [key]),
            )  # fmt: skip
        if updater is None:
            if takes_turn:
                self._turns.before_others_update(key, outcome == Outcome.REDUCED)
            return
        if rotates:
            self._turns.before_update(key)
        outcome = self._step.update(updater, key, result, held.array, outcome)
        if outcome == Outcome.REDUCED:
            held.up_to_date = ()
        if rotates:
            self._turns.after_update(key, outcome, takes_turn)


def create(name: str = TYPE) -> KVStore:
    """Create a store; calls hvd.init() if that was not done.

    name: dist_sync_perseus or dist-sync-perseus, in any case; ValueError for others, which
    mx.kvstore.create makes. It takes these two as well once perseus.mxnet is imported.
    """
    if not isinstance(name, str) or name.lower() not in SPELLINGS:
        raise ValueError(
            f"[kvstore] {name!r} is not a store of Perseus: {' or '.join(SPELLINGS)}; "
            f"mx.kvstore.create makes MXNet's own"
        )
    return KVStore()


# KVStoreBase.register's work, with names other than the class's.
mx.kvstore.KVStoreBase.kv_registry.update(dict.fromkeys(SPELLINGS, KVStore))
check_names()
