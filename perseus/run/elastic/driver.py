"""Runs an elastic job: worlds of ranks that follow each other while hosts and ranks come and go.

The processes of a job have numbers, which are never used twice; a process may be another rank in
every world. All its ranks leave a world when one of them fails, or at a commit after hosts have
changed. Each then asks to join the next world, which begins once every living rank of the last one
has asked. New processes start in the background and are announced to the ranks when they have
asked, together if they were started together. So no rank that can train waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf

from perseus.run import agent, environment, host_start
from perseus.run.bootstrap import words
from perseus.run.bootstrap.addresses import is_loopback, source_address
from perseus.run.elastic.cohort import Cohort
from perseus.run.elastic.departures import FAILED_STARTS, Departures, at_fault
from perseus.run.elastic.discovery import Watch
from perseus.run.elastic.elasticity import Elasticity
from perseus.run.elastic.feeds import Feeds
from perseus.run.elastic.late import Loading, Questions
from perseus.run.elastic.process import Process, what_happened
from perseus.run.elastic.ranking import Candidate, ranked
from perseus.run.elastic.slots import Place, UsableSlots
from perseus.run.hosts import Host, Slot
from perseus.run.job import Job, LaunchError
from perseus.run.launch import Launcher
from perseus.run.link import HostLink, is_local, real_name
from perseus.run.reports import MOST_BYTES, State

_START_SECONDS = 2.0  # after which ranks are looked at that have not met the others of a new world
_REPEAT_COMPLAINT_SECONDS = 30.0
_REPEAT_NEWS_SECONDS = 2.0  # a rank that is between two worlds forgets news
# How long a host may not answer while ranks wait for it, if others are enough for a world without
# it: where its ranks can come back as new ones, that costs less than all that wait; where they
# cannot, it is for ever.
_UNREACHABLE_SECONDS, _UNREACHABLE_FOR_EVER_SECONDS = 0.75, 8.0
_MOST_FAILED_STARTS = 40  # in a row, of all, so that no job starts for ever
_REMOVED, _ADDED = 1, 2  # of perseus.elastic.HostUpdateResult, which the launcher does not import
_WORLD = "world"  # the job of basics.init()
_NO_STATE = "No hosts from previous set remaining: nobody has the training's state"
_OUTPUTS = (agent.OUT, agent.ERR)
_ONE_LOOP = (
    "new ranks would begin with the first elastic.run of the script. Use one for the whole script, "
    "whose function looks at the state for the phase to go on with"
)


class ElasticLauncher(Launcher):
    """Runs one elastic job, once."""

    def __init__(
        self,
        job: Job,
        elasticity: Elasticity,
        on_answer: Callable[[int, bytes], None] | None = None,
    ) -> None:
        super().__init__(job, on_answer)
        self._elasticity = elasticity
        self._slots = UsableSlots(elasticity.cooldown)
        self._watch: Watch | None = None
        self._discovers_until = inf  # when to give up without a first answer
        self._address = ""  # of the store
        self._complaint = ""  # that has been printed; "" = none, or discovery works again
        self._complains_from = 0.0  # the earliest time of the next one
        self._processes: dict[int, Process] = {}  # those that live
        self._started = 0
        self._epoch = -1
        self._state_exists = False  # some rank has said that it has it
        self._latest_loop = 0  # of elastic training: the last one that some rank has begun
        self._world: list[tuple[int, Slot]] = []
        self._give_up_at: float | None = None  # when there have been too few ranks for too long
        self._waits_by = ""  # the flag that limits this wait
        # How long to try failed slots again for a world that waits: --elastic-timeout after the
        # first failure. Failures and returns of slots do not move it.
        self._retries_until = inf
        self._news: tuple[frozenset[int], frozenset[int]] = frozenset(), frozenset()
        self._news_at = 0.0
        self._questions = Questions(self._tell, self._print)
        self._watches_loading = Loading(self._print)
        self._feeds = Feeds(self._tell)
        self._departures = Departures(self._tell, job.grace)
        self._is_feeding = False  # when there were news last
        self._gathers_until = inf  # how long new ranks that are ready wait for others
        self._begun_at = 0.0
        self._begun = 0  # worlds for which some rank has met all others
        self._last_begun = -1  # of these
        self._failures: list[tuple[Process, int]] = []
        self._early: list[Process] = []  # that have ended without an error before the first world
        self._names: dict[int, str] = {}  # of all processes that have been in a world

    # ---- the job's course ------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._watch = Watch(self._elasticity.discovery, self._waker)
        self._discovers_until = time.monotonic() + self._elasticity.timeout
        self._address = self._store_address()
        self._serve(self._address)

    def _store_address(self) -> str:
        """Return the address at which all hosts reach the store; "" = each by its own."""
        interfaces, discovery = self._job.interfaces, self._elasticity.discovery
        if interfaces:
            return host_start.store_address([], interfaces)
        if discovery.may_change:  # who knows from where later hosts will come
            return ""
        others = [host.name for host in discovery.find() if not is_local(host.name)]
        if not others:
            return "127.0.0.1"
        if named := host_start.address_by_variables():
            return named
        found = [source_address(real_name(name)) for name in others]
        if None in found:  # only ssh knows the way there
            return ""
        # Loopback may lead into a tunnel, whose other end does not reach it.
        return next((address for address in found if address and not is_loopback(address)), "")

    def _start_and_wait(self) -> None:
        assert self._watch is not None
        with self._watch:
            self._loop(lambda: False)

    def _has_ended(self) -> bool:
        if self._ending or self._succeeded:
            return super()._has_ended()
        return False

    def _deadlines(self) -> list[float]:
        found = super()._deadlines()
        found += [each.end_at for each in self._processes.values()]
        if self._ending or self._succeeded:
            return found
        now = time.monotonic()
        found.append(self._discovers_until)
        if self._give_up_at is not None:
            found.append(self._give_up_at)
        if (back := self._slots.next_return(now)) is not None:
            found.append(back)
        if any(self._news):
            found.append(self._news_at + _REPEAT_NEWS_SECONDS)
        found.append(self._gathers_until)
        if self._loading():
            found.append(self._watches_loading.next_at)
        if self._late():
            found.append(self._questions.next_at())
        elif not all(each.has_begun for each in self._members()):
            found.append(max(now, self._begun_at + _START_SECONDS))
        return found

    def _check_deadlines(self, before: float) -> None:
        super()._check_deadlines(before)
        self._step(time.monotonic(), before)

    def _step(self, now: float, before: float) -> None:
        """Do whatever the present state asks for. before: as for _check_deadlines()."""
        self._release_ended_hosts()
        self._gathers_until = inf
        if self._ending:
            return
        self._departures.end_overdue(self._processes.values(), now)
        if self._succeeded:
            if self._epoch < 0:  # a command that asks for no world runs on all hosts
                self._start_on_ready_hosts()
            else:
                self._dismiss_spares(now)
            return
        if not self._has_hosts(before):
            return
        self._dismiss_unwanted(now)
        self._start_processes(now)
        self._start_on_ready_hosts()
        if self._may_begin(before):
            self._begin_world()
        else:
            self._check_patience(now, before)
        self._send_news(now, before)
        self._watches_loading.look(self._loading(), now)
        self._ask_late(now)

    def _has_hosts(self, before: float) -> bool:
        """Take what has been discovered. Return whether anything has, and fail if it never will."""
        assert self._watch is not None
        hosts, complaint = self._watch.hosts(), self._watch.complaint()
        if hosts is None:
            if complaint:
                self._fail(LaunchError(complaint))
            elif before >= self._discovers_until:
                limit = f"{self._elasticity.timeout:g} s (--elastic-timeout)"
                self._fail(LaunchError(f"the discovery of hosts has not answered within {limit}"))
            return False
        self._discovers_until = inf
        self._complain(complaint)
        self._discover(hosts)
        return True

    def _complain(self, complaint: str) -> None:
        """Say why discovery fails, if it does, and that it works again. Its reasons may differ each
        time, by a duration for example."""
        now = time.monotonic()
        if complaint and complaint != self._complaint and now >= self._complains_from:
            self._print(f"warning: {complaint}; the hosts stay as they are")
            self._complaint, self._complains_from = complaint, now + _REPEAT_COMPLAINT_SECONDS
        elif not complaint and self._complaint:
            self._print("the discovery of hosts works again")
            self._complaint = ""

    def _release_ended_hosts(self) -> None:
        """Close what belongs to agents that have ended: a long job may have many."""
        for host in [host for host in self._hosts if host.gone and not host.running]:
            self._hosts.remove(host)
            host.kill()
            host.process.wait()
            errors = host.process.stderr
            if errors is not None and errors in self._selector.get_map():
                self._selector.unregister(errors)
            host.close()
            self._close_streams(host.numbers)

    def _close_streams(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for kind in _OUTPUTS:
                stream = self._streams.pop((number, kind), None)
                if stream is not None:
                    stream.close()

    def _discover(self, hosts: Iterable[Host]) -> None:
        if self._slots.discover(hosts) and self._job.verbose:
            found = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
            self._print(f"hosts: {found or 'none'}")

    # ---- processes -------------------------------------------------------------------------------

    def _wanted(self, now: float) -> list[Place]:
        """Return the places that are to have ranks: members' first, then other present ones'."""
        # A slot that is barred because a rank failed there never holds a living one.
        usable = self._slots.usable(now)
        present = {process.place for process in self._processes.values() if not process.dismissed}
        trained = {process.place for process in self._members() if not process.dismissed}
        if self._is_closed():
            usable = [place for place in usable if place in trained]
        usable.sort(key=lambda place: (place not in trained, place not in present))
        return usable[: self._elasticity.most]

    def _is_closed(self) -> bool:
        """Whether new ranks cannot join any more: they would begin with the first loop, whose
        state, and whose operations, are not those of the present one."""
        return self._latest_loop > 1 and self._epoch >= 0

    def _start_processes(self, now: float) -> None:
        wanted = self._wanted(now)
        if self._epoch < 0 and not self._processes and len(wanted) < self._elasticity.start:
            return
        present = {process.place for process in self._processes.values()}
        new: dict[str, list[Place]] = {}
        for place in wanted:
            if place not in present:
                new.setdefault(place[0], []).append(place)
        cohort = Cohort(now)
        for name, places in new.items():
            self._start_at(name, places, cohort)

    def _start_at(self, name: str, places: list[Place], cohort: Cohort) -> None:
        """Start an agent on a host, which will start a process for each place."""
        numbers = list(range(self._started, self._started + len(places)))
        self._started += len(places)
        try:
            for number in numbers:
                self._open_streams(number, number)
            host = self._connect(name, numbers)
        except LaunchError as error:
            self._close_streams(numbers)
            self._on_unstarted(places, error)
            return
        host.shared_by = max(self._slots.slots_of(name), len(places))
        for number, place in zip(numbers, places, strict=True):
            self._processes[number] = Process(number, place, host, cohort=cohort)

    def _is_under_way(self) -> bool:
        return self._epoch >= 0

    def _is_local(self, name: str) -> bool:
        assert self._watch is not None
        return self._watch.is_local(name)

    def _on_unstarted(self, places: list[Place], error: LaunchError) -> None:
        """Fail if nothing runs yet; else go on, as without hosts that are lost."""
        if self._epoch < 0:
            raise error
        self._print(str(error))
        for place in places:
            self._slots.bar(place, time.monotonic())

    def _start_on_ready_hosts(self) -> None:
        for host in self._hosts:
            if host.hello is None or host.given_job or host.gone:
                continue
            host.given_job = True
            try:
                self._start_all(host)
            except LaunchError as error:
                if self._epoch < 0:
                    raise
                self._on_lost_hosts([host], error)

    def _start_all(self, host: HostLink) -> None:
        address = self._address or host_start.store_address([host], [])
        common = environment.of_job(
            address, self._server.port, self._secret, self._job.interfaces, self._job.flags
        )
        ranks = [
            (number, environment.of_process(*self._processes[number].place))
            for number in sorted(host.running)
            if number in self._processes
        ]
        self._start_on(host, ranks, common, control=True)

    def _on_state(self, number: int, state: State) -> None:
        process = self._processes.get(number)
        if process is None:
            return
        process.is_stopped = state.is_stopped
        if process.ticks is not None and state.ticks > process.ticks:
            process.heard_at = time.monotonic()  # it works, even if it cannot answer
        process.ticks = state.ticks

    def _on_control(self, number: int, data: bytes) -> None:
        process = self._processes.get(number)
        if process is None or process.is_killed:
            return
        process.heard_at = time.monotonic()
        *lines, process.unread = (process.unread + data).split(b"\n")
        try:
            for line in lines:
                self._on_word(process, words.from_rank(line))
            if len(process.unread) > MOST_BYTES:
                raise ValueError(f"[elastic] no line of a rank has {len(process.unread)} bytes")
        except ValueError as error:
            self._print(f"{process.name}: {error}: it is killed")
            process.kill()

    def _on_word(self, process: Process, word: words.FromRank) -> None:
        if isinstance(word, words.Begun):
            if word.epoch == self._epoch == process.epoch:
                process.has_begun, process.is_new, process.failed_starts = True, False, 0
                self._begun += self._last_begun != self._epoch
                self._last_begun = self._epoch
        elif isinstance(word, words.Join):
            process.request = word
            if process.epoch < 0:
                process.cohort.on_ready(time.monotonic())
            self._state_exists = self._state_exists or word.state is True
            self._on_join(process)
        elif isinstance(word, words.Fed):
            self._feeds.on_fed(process, word)
        elif isinstance(word, words.Loop):
            self._on_loop(process, word.number)

    def _on_loop(self, process: Process, number: int) -> None:
        process.loop = number
        if self._latest_loop < 2 <= number:
            self._print(f"warning: no new rank can join the job any more: {_ONE_LOOP}")
        self._latest_loop = max(self._latest_loop, number)

    def _on_join(self, process: Process) -> None:
        if self._epoch < 0:
            # There will be a world, so those that have ended are missing.
            self._succeeded.clear()
            while self._early:
                self._on_failure(self._early.pop(), 0)
        if self._succeeded:
            number, _ = self._succeeded[0]
            if process.epoch == self._epoch:
                why = f"there is no next world: {self.name_of(number)} has finished"
                self._tell(process, words.Refuse(why))
            else:
                self._departures.dismiss(process, "the job has finished")

    def _tell(self, process: Process, word: words.FromLauncher) -> None:
        process.host.send(b"TELL %d %b\n" % (process.number, words.line_of(word)))

    def _spares(self) -> list[Process]:
        """Return the processes that are not in the present world, and have not been dismissed."""
        found = self._processes.values()
        return [each for each in found if each.epoch != self._epoch and not each.dismissed]

    def _dismiss_unwanted(self, now: float) -> None:
        """Let those go that have lost their slot before they were in a world: no news reach them,
        and the next world may be far."""
        if self._epoch < 0:
            return
        wanted = set(self._wanted(now))
        for process in self._spares():
            if process.host.given_job and process.place not in wanted:
                self._departures.let_go(process, self._why_unwanted(process), now)

    def _why_unwanted(self, process: Process) -> str:
        if self._is_closed() and process.loop < self._latest_loop:
            return f"the others have begun elastic.run number {self._latest_loop}, and {_ONE_LOOP}"
        return f"{process.place[0]} does not have its slot any more"

    def _dismiss_spares(self, now: float) -> None:
        """After the first success: let those go that are not in the last world."""
        for process in self._spares():
            self._departures.let_go(process, "the job has finished", now)
        for host in self._hosts:
            if not (host.given_job or host.gone):
                host.lost = True
                host.kill()
        self._departures.end_overdue(self._processes.values(), now)

    def name_of(self, number: int) -> str:
        """See Launcher."""
        return self._names.get(number, f"process {number}")

    def ranks(self) -> list[int]:
        """Return the numbers of the last world's processes, ordered by rank.

        If no process has asked for a world, return those that have succeeded.
        """
        return [number for number, _ in self._world] or sorted(n for n, _ in self._succeeded)

    # ---- worlds ----------------------------------------------------------------------------------

    def _members(self) -> list[Process]:
        """Return the processes of the present world that live."""
        return [each for each in self._processes.values() if each.epoch == self._epoch >= 0]

    def _candidates(self) -> list[Process]:
        """Return the processes that could be in the next world now."""
        wanted = set(self._wanted(time.monotonic()))
        return [
            each
            for each in self._processes.values()
            if each.request is not None and not each.dismissed and each.place in wanted
            # The others go back to the last commit of an earlier loop.
            if each.loop == self._latest_loop or not self._is_closed()
        ]

    def _may_begin(self, before: float) -> bool:
        candidates = self._candidates()
        count = len(candidates)
        if self._epoch < 0:
            # Those that start together begin together, as long as they live and are not too slow.
            wanted = set(self._wanted(time.monotonic()))
            awaited = [each for each in self._processes.values() if each.place in wanted]
            too_slow = self._give_up_at is not None and before >= self._give_up_at
            return count >= self._elasticity.start and (count == len(awaited) or too_slow)
        members = self._members()
        if not members or any(each.request is None for each in members):
            return False
        # Survivors that are enough go on at once. Others have to wait for new ranks in any case.
        survivors = sum(each.epoch == self._epoch for each in candidates)
        least = self._elasticity.least
        return survivors >= least or (count >= least and not self._gathers(before))

    def _gathers(self, before: float) -> bool:
        """Return whether new ranks that are ready wait for others that were started with them.

        So they join one world, instead of one each. before: as for _check_deadlines().
        """
        ready = {each.cohort for each in self._candidates() if each.epoch != self._epoch}
        wanted = set(self._wanted(time.monotonic()))
        others = [each for each in self._starting() if each.place in wanted]
        until = min((cohort.waits_until for cohort in ready), default=-inf)
        if before >= until or not any(each.cohort in ready for each in others):
            return False
        self._gathers_until = until
        return True

    def _begin_world(self) -> None:
        elasticity = self._elasticity
        if elasticity.reset_limit is not None and self._begun > elasticity.reset_limit:
            self._fail(
                LaunchError(
                    f"Horovod was shutdown because number of resets during elastic job exceeded "
                    f"limit: {elasticity.reset_limit}"
                )
            )
            return
        if self._epoch - self._last_begun >= _MOST_FAILED_STARTS:
            self._give_up(f"{_MOST_FAILED_STARTS} worlds in a row did not begin")
            return
        self._dismiss_faulty()
        able = self._candidates()
        chosen = self._with_state(able)
        candidates = [
            Candidate(
                each.number,
                *each.place,
                each.rank if each.epoch == self._epoch >= 0 and each.has_state else None,
                each.commits,
                each.first_local_rank,
            )
            for each in chosen
        ]
        if self._state_exists and all(each.rank is None for each in candidates):
            self._give_up(_NO_STATE)
            return
        for process in list(self._processes.values()):
            if process.request is not None and process not in chosen and process not in able:
                self._departures.dismiss(process, self._why_unwanted(process))
        last, self._epoch = self._epoch, self._epoch + 1
        self._begun_at = time.monotonic()
        self._questions.forget()
        self._feeds.forget()
        sync = any(each.request is not None and each.request.sync for each in chosen)
        fed = any(each.fed for each in chosen)
        order = ranked(candidates)
        commits = order[0][0].commits
        self._world = [(candidate.number, slot) for candidate, slot in order]
        for number, slot in self._world:
            process = self._processes[number]
            process.had_state, process.has_begun = process.has_state, False
            process.epoch, process.rank, process.request = self._epoch, slot.rank, None
            process.is_stopped, process.feed, process.fed = False, None, False
            if process.first_local_rank is None:
                process.first_local_rank = slot.local_rank
            self._names[number] = process.name
            for kind in _OUTPUTS:
                self._streams[number, kind].rename(slot.rank)
            variables = environment.of_rank(slot, len(self._world))
            self._tell(process, words.Place(self._epoch, sync, commits, fed, variables))
        self._news = frozenset(), frozenset()
        self._give_up_at, self._retries_until = None, inf
        if last >= 0 or self._job.verbose:
            self._announce_world()

    def _with_state(self, able: list[Process]) -> list[Process]:
        """Return who is to be in the next world of those that can be.

        If none of them has the training's state, a rank that has lost its slot stays to pass it on.
        It takes the place of a new one where there would be too many ranks, but not of the only
        one. The news of its removal lets it go at its first commit.
        """
        holders = [each for each in self._members() if each.has_state]
        if not self._state_exists or not holders or any(each in able for each in holders):
            return able
        most = self._elasticity.most
        count = len(able) if most is None else max(1, min(len(able), most - 1))
        return [*able[:count], min(holders, key=lambda each: (-each.commits, each.rank))]

    def _dismiss_faulty(self) -> None:
        """Let processes go that have failed to begin several worlds while nobody died."""
        members = self._members()
        if len(members) < len(self._world):  # the ends of others look like errors of one's own
            return
        leaving = at_fault(members)
        rest = [each for each in self._candidates() if each not in leaving]
        if len(rest) < self._elasticity.least:  # what is wrong may pass
            return
        if self._state_exists and not any(each.has_state for each in rest):
            return
        why = f"{FAILED_STARTS} worlds did not begin because of it"
        for process in leaving:
            self._departures.dismiss(process, why)
            self._bar(process, f"leaves: {why}", time.monotonic())

    def _announce_world(self) -> None:
        counts: dict[str, int] = {}
        for _, slot in self._world:
            counts[slot.host] = counts.get(slot.host, 0) + 1
        where = ", ".join(f"{count} on {host}" for host, count in counts.items())
        self._print(f"world {self._epoch}: {len(self._world)} ranks, {where}")

    def _check_patience(self, now: float, before: float) -> None:
        """Give up once too few ranks have been there for too long, or can never come."""
        elasticity = self._elasticity
        is_first = self._epoch < 0
        members = list(self._processes.values()) if is_first else self._members()
        if not members and not is_first:
            self._give_up(_NO_STATE)
            return
        needed = elasticity.start if is_first else elasticity.least
        usable = len(self._wanted(now))
        slots = self._promising(now, before) if is_first else usable
        asked = [each.request is not None for each in members]
        # Ranks that still train need nobody else. Those of the first world may still be loading,
        # and later ones that are enough wait for those that were started with them.
        if is_first:
            waits = slots < needed or any(asked)
        else:
            waits = all(asked) and len(self._candidates()) < needed
        if not waits:
            self._give_up_at = None
            if not is_first and not all(asked):  # ranks that train wait for no slot
                self._retries_until = inf
            return
        if self._is_closed():
            # Those without a slot may get it back.
            left = sum(each.loop == self._latest_loop and not each.dismissed for each in members)
            if left < needed:
                self._give_up(f"{left} ranks are left, instead of {needed}, and {_ONE_LOOP}")
                return
        more_may_come = elasticity.discovery.may_change and (usable > 0 or not self._slots.hosts())
        if usable < needed and not more_may_come and self._slots.next_return(now) is None:
            self._give_up(f"{usable} slots are left that have not failed, instead of {needed}")
            return
        flag, limit = "--elastic-timeout", elasticity.timeout
        if is_first and slots >= needed:
            flag, limit = "--start-timeout", self._job.start_timeout
        if self._give_up_at is None or flag != self._waits_by:
            self._give_up_at, self._waits_by = now + limit, flag
            if flag == "--elastic-timeout":
                self._give_up_at = min(self._give_up_at, self._retries_until)
        if before >= self._give_up_at:
            from_failure = self._give_up_at == self._retries_until
            when = f"{limit:g} s after the first failure" if from_failure else f"after {limit:g} s"
            self._give_up(
                f"{sum(asked)} ranks asked to join and {slots} slots can be used {when} ({flag}), "
                f"instead of {needed}"
            )

    def _promising(self, now: float, before: float) -> int:
        """Return in how many slots a rank of the first world may come up.

        Once the time to try failed slots again is over, those that have failed count only if their
        processes started earlier, however slowly they load, or have asked to join.
        before: as for _check_deadlines().
        """
        wanted = self._wanted(now)
        if before < self._retries_until:
            return len(wanted)
        in_time = {
            each.place
            for each in self._processes.values()
            if each.request is not None or each.cohort.started_at < self._retries_until
        }
        return sum(place in in_time or not self._slots.has_failed(place) for place in wanted)

    def _give_up(self, why: str) -> None:
        """End the job: with the first failure's exit status if there was one."""
        if not self._failures:
            self._fail(LaunchError(why))
            return
        self._print(f"the job ends: {why}")
        in_last_world = [each for each in self._failures if each[0].epoch == self._epoch]
        self._set_first_failure(*(in_last_world or self._failures)[0])
        self._end()

    def _set_first_failure(self, process: Process, status: int) -> None:
        self._names.setdefault(process.number, process.name)
        self.first_failure, self._failed_at = (process.number, status), time.monotonic()

    def _exit_status(self) -> int:
        """See Launcher. A rank of the last world that has failed has no successor any more."""
        failed = [each for each in self._failures if each[0].epoch == self._epoch >= 0]
        if failed and self._succeeded and self.first_failure is None:
            self._set_first_failure(*failed[0])
        return super()._exit_status()

    # ---- changes ---------------------------------------------------------------------------------

    def _send_news(self, now: float, before: float) -> None:
        """Tell the ranks that others are to go, or have come. before: as for _check_deadlines()."""
        members = self._members()
        wanted = set(self._wanted(now))
        removed = frozenset(each.number for each in members if each.place not in wanted)
        new = [each for each in self._candidates() if each.epoch != self._epoch]
        training = [each for each in members if each.request is None and each.has_begun]
        if len(training) == len(members):
            self._feeds.begin(training, new, self._loading(), now)
        feeding = self._feeds.are_under_way(self._processes.values(), now)
        if not (removed or self._news[1]) and self._gathers(before):
            new = []
        news = removed, frozenset(each.number for each in new)
        is_new = bool(frozenset().union(*news) - frozenset().union(*self._news))
        is_new |= any(news) and feeding != self._is_feeding
        again = any(news) and now >= self._news_at + _REPEAT_NEWS_SECONDS
        self._news = news
        if not (is_new or again):
            return
        self._news_at, self._is_feeding = now, feeding
        change = (_REMOVED if removed else 0) | (_ADDED if new else 0)
        for process in members:
            if process.request is None:
                self._tell(process, words.News(time.monotonic(), change, feeding))

    def _starting(self) -> list[Process]:
        """Return the processes that have not asked for a world yet, on any host."""
        return [
            each
            for each in self._processes.values()
            if each.epoch < 0 and each.request is None
            if not each.dismissed and not each.is_killed
        ]

    def _loading(self) -> list[Process]:
        """Return those of them that run, since their hosts have answered."""
        return [each for each in self._starting() if each.host.given_job]

    def _late(self) -> list[Process]:
        """Return the ranks for which others wait that have left the world, or cannot begin it."""
        members = self._members()
        if any(each.request is not None for each in members):
            return [each for each in members if each.request is None]
        if time.monotonic() < self._begun_at + _START_SECONDS:
            return []
        return [each for each in members if not each.has_begun]

    def _ask_late(self, now: float) -> None:
        """Find out whether late ranks, and their hosts, live; go on without those that do not."""
        late = self._late()
        if self._questions.are_due(late, now):
            self._give_up_unreachable(late, now)
            others_wait = any(each.request is not None for each in self._members())
            self._questions.ask(late, others_wait, now)

    def _give_up_unreachable(self, late: list[Process], now: float) -> None:
        """Go on without hosts that do not answer any more, if others suffice for a world."""
        comes_back = self._elasticity.cooldown is not None
        patience = _UNREACHABLE_SECONDS if comes_back else _UNREACHABLE_FOR_EVER_SECONDS
        awaited = {id(process.host) for process in late}
        silent = {
            host.name
            for host in self._monitored_hosts()
            if id(host) in awaited and now >= max(host.alive_at, self._questions.since) + patience
        }
        is_start = all(each.request is None for each in self._members())
        others = [
            each
            for each in (self._members() if is_start else self._candidates())
            if each.host.name not in silent
        ]
        if not silent or len(others) < self._elasticity.least:
            return
        if self._state_exists and not any(
            each.had_state if is_start else each.epoch == self._epoch and each.has_state
            for each in others
        ):
            return
        error = LaunchError(
            f"{', '.join(sorted(silent))}: no answer for {patience:g} s while others wait for the "
            f"next world, which begins without it"
        )
        self._on_lost_hosts(
            [host for host in self._monitored_hosts() if host.name in silent], error
        )

    # ---- ends ------------------------------------------------------------------------------------

    def _rank_exited(self, host: HostLink, rank: int, status: int) -> None:
        host.running.discard(rank)
        for kind in _OUTPUTS:
            self._streams[rank, kind].flush()
        process = self._processes.pop(rank, None)
        if self._ending or process is None or process.dismissed:
            return
        if status == 0 and self._epoch < 0:
            if any(other.request is not None for other in self._processes.values()):
                self._on_failure(process, status)
                return
            self._early.append(process)
        if status == 0 and process.epoch == self._epoch:
            self._succeeded.append((rank, time.monotonic()))
            self._names.setdefault(rank, process.name)
            for other in self._processes.values():
                if other.request is not None:
                    self._on_join(other)
            return
        self._on_failure(process, status)

    def _on_failure(self, process: Process, status: int) -> None:
        now = time.monotonic()
        if status != 0:
            self._failures.append((process, status))
        if self._succeeded:  # there is no next world
            self.first_failure, self._failed_at = (process.number, status), now
            self._end()
            return
        self._bar(process, what_happened(status), now)
        if process.epoch == self._epoch >= 0:
            why = f"{process.name} {what_happened(status)}"
            with suppress(RuntimeError):  # without it, others wait for HOROVOD_START_TIMEOUT
                self._server.abandon(_WORLD, self._epoch, process.rank, why)

    def _bar(self, process: Process, what: str, now: float) -> None:
        self._retries_until = min(self._retries_until, now + self._elasticity.timeout)
        wait = self._slots.bar(process.place, now)
        rest = "its slot is not used again" if wait is None else f"its slot rests for {wait:.0f} s"
        self._print(f"{process.name} {what}; {rest}")

    def _on_unstartable(self, error: LaunchError) -> None:
        """Fail if that is so from the beginning; later on, it is a host that is lost."""
        if self._epoch < 0:
            self._fail(error)
        else:
            self._print(str(error))

    def _on_lost_hosts(self, hosts: list[HostLink], error: LaunchError) -> None:
        """Go on without hosts that cannot be reached."""
        fresh = [host for host in hosts if not host.lost]
        if fresh:
            self._print(str(error))
        for host in fresh:
            host.lost = True
            host.kill()
            host.start_by = host.alive_at = inf
            for number in sorted(host.running):
                self._rank_exited(host, number, error.code)
