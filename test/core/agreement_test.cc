// The replicated table of names by itself, rounds made by hand: what is ready, in which order, is the same on all
// ranks, whatever each of them submitted when.
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <random>

#include "control/negotiation.h"
#include "world.h"

namespace {

using namespace perseus;

Description allreduce(int64_t count, int priority = 0, bool transient = false) {
  Description d;
  d.tensors.push_back({DType::kFloat32, {count}});
  d.priority = priority;
  d.transient = transient;
  return d;
}

struct Outcome {
  std::vector<std::string> ready;             // in order of execution
  std::map<std::string, std::string> failed;  // with the reason
};

// All ranks of a group in one thread.
class Ranks {
 public:
  explicit Ranks(int size) : size_(size) {
    std::vector<int> ranks;
    for (int r = 0; r < size; ++r) ranks.push_back(r);
    for (int r = 0; r < size; ++r) tables_.emplace_back(r, ranks, [this] { return &entries_.emplace_back(); });
  }

  bool submit(int rank, const std::string& name, Description description) {
    Entry& entry = entries_.emplace_back();
    entry.description = std::move(description);
    return tables_[static_cast<size_t>(rank)].submit(name.c_str(), &entry) == Negotiation::Submitted::kYes;
  }
  void submit_everywhere(const std::string& name, const Description& description) {
    for (int r = 0; r < size_; ++r) ASSERT_TRUE(submit(r, name, description)) << name;
  }

  // One round that all take part in; checks that all come to the same result, which it returns. `meanwhile` happens to
  // rank 0 while what it has said is on its way.
  Outcome round(const std::function<void(Negotiation&)>& meanwhile = {}) {
    const std::vector<Outcome> outcomes = results(meanwhile);
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.ready, outcomes[0].ready);
      EXPECT_EQ(outcome.failed, outcomes[0].failed);
    }
    return outcomes[0];
  }
  // The same, with the result of every rank.
  std::vector<Outcome> results(const std::function<void(Negotiation&)>& meanwhile = {}) {
    RoundContent merged;
    std::vector<RoundContent> parts(tables_.size());
    merged.announced.resize(tables_.size());
    for (int r = 0; r < size_; ++r) {
      const size_t i = static_cast<size_t>(r);
      parts[i].announced.resize(tables_.size());
      tables_[i].collect();
      tables_[i].snapshot(&parts[i]);
      if (r == 0) merged.bits = parts[i].bits;
      EXPECT_EQ(parts[i].bits.size(), merged.bits.size()) << "ranks know different slots";
      for (size_t word = 0; word < merged.bits.size(); ++word) merged.bits[word] &= parts[i].bits[word];
      merged.announced[i] = parts[i].announced[i];
    }
    if (meanwhile) meanwhile(tables_[0]);
    words_ = merged.bits.size();
    described_ = 0;
    for (const std::string& blob : merged.announced) described_ += blob.size();
    std::vector<Outcome> outcomes;
    for (Negotiation& table : tables_) {
      std::vector<Entry*> ready;
      std::vector<std::pair<Entry*, std::string>> failed;
      table.apply(merged, &ready, &failed);
      Outcome& outcome = outcomes.emplace_back();
      for (Entry* entry : ready) {
        outcome.ready.push_back(entry->name->text);
        last_stayed_ = entry->description.stays_on_device;
      }
      for (auto& [entry, reason] : failed) outcome.failed[entry->name->text] = reason;
      for (auto& [entry, reason] : failed) ready.push_back(entry);
      if (&table == &tables_.back() && slow_) held_.insert(held_.end(), ready.begin(), ready.end());
      else
        for (Entry* entry : ready) table.retire(entry);
    }
    return outcomes;
  }
  // The last rank is still busy with what becomes ready, until `slow` is false again.
  void set_slow(bool slow) {
    slow_ = slow;
    if (slow) return;
    for (Entry* entry : held_) tables_.back().retire(entry);
    held_.clear();
  }
  void block(int rank, const std::string& waits_for) { tables_[static_cast<size_t>(rank)].set_blocked(waits_for); }
  size_t words() const { return words_; }          // of the last round's bits
  size_t described() const { return described_; }  // bytes of that round's requests
  // Did all ranks' tensors of the entry that was ready last stay on their devices?
  bool last_stayed() const { return last_stayed_; }

 private:
  const int size_;
  std::deque<Negotiation> tables_;
  std::deque<Entry> entries_;
  size_t words_ = 0, described_ = 0;
  bool last_stayed_ = false, slow_ = false;
  std::vector<Entry*> held_;
};

using Names = std::vector<std::string>;

TEST(Agreement, WhatIsReadyTogetherRunsByPriorityThenInTheOrderOfFirstAgreement) {
  Ranks ranks(3);
  for (const char* name : {"a", "b", "c", "d"}) ranks.submit_everywhere(name, allreduce(1, *name == 'c' ? 5 : 0));
  EXPECT_EQ(ranks.round().ready, (Names{"c", "a", "b", "d"}));
  // Known names, every rank in another order, "d" missing on one.
  for (int r = 0; r < 3; ++r)
    for (int i = 0; i < 4; ++i) {
      const std::string name(1, static_cast<char>('a' + (i * 3 + r) % 4));
      if (name != "d" || r != 1) ranks.submit(r, name, allreduce(1, name == "c" ? 5 : 0));
    }
  EXPECT_EQ(ranks.round().ready, (Names{"c", "a", "b"}));
  EXPECT_EQ(ranks.round().ready, Names());
  ranks.submit(1, "d", allreduce(1));
  EXPECT_EQ(ranks.round().ready, Names{"d"});
}

TEST(Agreement, MoreThanARoundHoldsIsToldInTheNextOnes) {
  // Ranks of a large job, of which each may say so much that a message can have what all say.
  Ranks ranks(3);
  Names names;
  for (int i = 0; i < 25; ++i) names.push_back(std::string(1 << 20, static_cast<char>('a' + i)));
  for (const std::string& name : names) ranks.submit_everywhere(name, allreduce(1));
  Names ready;
  int rounds = 0;
  for (; ready.size() < names.size() && rounds < 10; ++rounds)
    for (const std::string& name : ranks.round().ready) ready.push_back(name);
  EXPECT_EQ(ready, names);
  EXPECT_EQ(rounds, 3);
}

TEST(Agreement, WhatIsSubmittedDuringTheRoundThatFindsADeadlockStays) {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) ranks.submit(r, r == 0 ? "a" : "b", allreduce(1));
  ranks.round();
  for (int r = 0; r < 2; ++r) ranks.block(r, r == 0 ? "a" : "b");
  const std::vector<Outcome> outcomes = ranks.results([&](Negotiation& of_rank_0) {
    ranks.submit(0, "x", allreduce(1));
    of_rank_0.collect();
  });
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(outcomes[r].failed.size(), 1u);
    EXPECT_EQ(outcomes[r].failed.count(r == 0 ? "a" : "b"), 1u);
  }
  ranks.submit(1, "x", allreduce(1));
  EXPECT_EQ(ranks.round().ready, Names{"x"});
  ranks.submit_everywhere("a", allreduce(1));
  EXPECT_EQ(ranks.round().ready, Names{"a"});
}

TEST(Agreement, TheLowestRanksPriorityGoesForAll) {
  Ranks ranks(2);
  for (int r = 0; r < 2; ++r) {
    ranks.submit(r, "early", allreduce(1, r == 0 ? 1 : 9));
    ranks.submit(r, "late", allreduce(1, r == 0 ? 2 : 0));
  }
  EXPECT_EQ(ranks.round().ready, (Names{"late", "early"}));
  // Agreed at first sight: another priority later changes nothing.
  for (int r = 0; r < 2; ++r) {
    ranks.submit(r, "early", allreduce(1, 100));
    ranks.submit(r, "late", allreduce(1, -100));
  }
  EXPECT_EQ(ranks.round().ready, (Names{"late", "early"}));
}

TEST(Agreement, KnownNamesAreOneBit) {
  Ranks ranks(2);
  for (int i = 0; i < 130; ++i) ranks.submit_everywhere("t" + std::to_string(i), allreduce(i));
  EXPECT_EQ(ranks.round().ready.size(), 130u);
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < 130; ++i) ranks.submit_everywhere("t" + std::to_string(i), allreduce(i));
    EXPECT_EQ(ranks.round().ready.size(), 130u);
    EXPECT_EQ(ranks.words(), 3u);
  }
}

TEST(Agreement, TransientNamesTakeNoSlot) {
  Ranks ranks(2);
  for (int i = 0; i < 200; ++i) {
    ranks.submit_everywhere("once" + std::to_string(i), allreduce(3, 0, true));
    EXPECT_EQ(ranks.round().ready.size(), 1u);
  }
  ranks.round();
  EXPECT_EQ(ranks.words(), 0u);
}

// The others are done with the first one, and so may use its name again, before a rank that has joined is.
TEST(Agreement, ANameLivesUntilARankThatHasJoinedHasGivenItsZerosToAllOperationsOfThatName) {
  Ranks ranks(2);
  Description join;
  join.kind = Kind::kJoin;
  ranks.submit(1, "join", join);
  EXPECT_EQ(ranks.round().ready, Names());
  ranks.set_slow(true);
  for (int i = 0; i < 3; ++i) {
    ranks.submit(0, "once", allreduce(3, 0, true));
    EXPECT_EQ(ranks.round().ready, Names{"once"});
  }
  ranks.set_slow(false);
  ranks.submit(0, "join", join);
  EXPECT_EQ(ranks.round().ready, Names());
  EXPECT_EQ(ranks.round().ready, Names{"join"});
  ranks.submit_everywhere("once", allreduce(3, 0, true));
  EXPECT_EQ(ranks.round().ready, Names{"once"});
}

TEST(Agreement, ANewShapeMakesAllStartOverAndSlotsAreUsedAgain) {
  Ranks ranks(3);
  for (int i = 0; i < 64; ++i) ranks.submit_everywhere("t" + std::to_string(i), allreduce(1));
  EXPECT_EQ(ranks.round().ready.size(), 64u);
  for (int64_t shape = 2; shape < 40; ++shape) {
    const std::string name = "t" + std::to_string(shape % 7);
    const int first = static_cast<int>(shape % 3);
    ranks.submit(first, name, allreduce(shape));
    EXPECT_EQ(ranks.round().ready, Names());
    ranks.submit((first + 1) % 3, name, allreduce(shape));
    ranks.submit((first + 2) % 3, name, allreduce(shape));
    EXPECT_EQ(ranks.round().ready, Names{name});
    ranks.submit_everywhere(name, allreduce(shape));
    EXPECT_EQ(ranks.round().ready, Names{name});
    EXPECT_EQ(ranks.words(), 1u);
  }
}

TEST(Agreement, WhatIsDescribedAnewInItsOldOrderKeepsIt) {
  Ranks ranks(2);
  const Names names = {"d", "b", "a", "c"};
  for (const int64_t count : {1, 2, 2}) {
    for (const std::string& name : names) ranks.submit_everywhere(name, allreduce(count));
    EXPECT_EQ(ranks.round().ready, names);
  }
}

// A rank that says so first waits for the others without describing anything in every step.
TEST(Agreement, WhatStaysOnGpusIsAgreedOnAgainOnceARankLeavesItThere) {
  Ranks ranks(3);
  Description kept = allreduce(1);
  kept.stays_on_device = true;
  const auto step = [&](int ranks_that_keep) {
    for (int r = 0; r < 3; ++r) ranks.submit(r, "g", r < ranks_that_keep ? kept : allreduce(1));
    int rounds = 1;
    while (ranks.round().ready.empty() && rounds < 5) ++rounds;
    return std::make_pair(rounds, ranks.last_stayed());
  };
  using Step = std::pair<int, bool>;
  EXPECT_EQ(step(0), Step(1, false));
  EXPECT_EQ(step(0), Step(1, false));
  EXPECT_EQ(step(1), Step(2, false));  // the others' bits become descriptions
  EXPECT_EQ(step(1), Step(1, false));
  EXPECT_EQ(ranks.described(), 0U);
  EXPECT_EQ(step(3), Step(2, true));
  EXPECT_EQ(step(3), Step(1, true));
  EXPECT_EQ(ranks.described(), 0U);
  EXPECT_EQ(step(2), Step(2, false));
  EXPECT_EQ(step(3), Step(2, true));
}

TEST(Agreement, ADifferingDescriptionTurnsPendingBitsIntoAMismatch) {
  Ranks ranks(3);
  ranks.submit_everywhere("t", allreduce(5));
  EXPECT_EQ(ranks.round().ready, Names{"t"});
  ranks.submit(0, "t", allreduce(5));
  ranks.submit(2, "t", allreduce(5));
  EXPECT_EQ(ranks.round().ready, Names());
  ranks.submit(1, "t", allreduce(6));
  Outcome outcome = ranks.round();  // tells ranks 0 and 2, whose bits become descriptions
  EXPECT_TRUE(outcome.ready.empty() && outcome.failed.empty());
  outcome = ranks.round();
  EXPECT_EQ(outcome.ready, Names());
  EXPECT_NE(outcome.failed["t"].find("[5]"), std::string::npos) << outcome.failed["t"];
  EXPECT_NE(outcome.failed["t"].find("ranks 0 and 1"), std::string::npos) << outcome.failed["t"];
  ranks.submit_everywhere("t", allreduce(5));
  EXPECT_EQ(ranks.round().ready, Names{"t"});
}

// Random histories: every rank goes through the same requests of every name, at times of its own; sometimes one of them
// differs. Nothing may get lost, be mixed up, or end differently on different ranks.
TEST(Agreement, RandomHistoriesAgree) {
  for (uint64_t seed = 1; seed <= (perseus_test::thin_grid() ? 15 : 60); ++seed) {
    std::mt19937_64 random(seed);
    const int size = 2 + static_cast<int>(seed % 4);
    constexpr int kNames = 9, kRequests = 30;
    Ranks ranks(size);
    // What rank r asks for as its k-th request of a name, and how far each has come.
    const auto request = [&](int name, int k, int r) {
      std::mt19937_64 of_request(seed * 7919 + static_cast<uint64_t>(name * 1000 + k));
      const bool odd_one = of_request() % 8 == 0 && static_cast<int>(of_request() % static_cast<uint64_t>(size)) == r;
      const int64_t shape = static_cast<int64_t>(of_request() % 10 == 0 ? 1 + of_request() % 3 : 7);
      return allreduce(odd_one ? 99 : shape, static_cast<int>(of_request() % 3), name == 0);
    };
    std::vector<std::vector<int>> submitted(kNames, std::vector<int>(static_cast<size_t>(size), 0));
    std::vector<int> done(kNames, 0);
    int left = kNames * kRequests;
    for (int round = 0; left > 0; ++round) {
      ASSERT_LT(round, 20000) << "seed " << seed << ": " << left << " requests never ended";
      for (int name = 0; name < kNames; ++name)
        for (int r = 0; r < size; ++r) {
          int& next = submitted[static_cast<size_t>(name)][static_cast<size_t>(r)];
          if (next > done[static_cast<size_t>(name)] || next == kRequests || random() % 3 != 0) continue;
          ASSERT_TRUE(ranks.submit(r, "n" + std::to_string(name), request(name, next, r)));
          ++next;
        }
      const Outcome outcome = ranks.round();
      Names ended = outcome.ready;
      for (auto& [name, reason] : outcome.failed) ended.push_back(name);
      for (const std::string& text : ended) {
        const int name = text[1] - '0';
        const int k = done[static_cast<size_t>(name)]++;
        bool agree = true;
        for (int r = 0; r < size; ++r) {
          ASSERT_EQ(submitted[static_cast<size_t>(name)][static_cast<size_t>(r)], k + 1)
              << "ended before all were there";
          agree = agree && request(name, k, r).tensors[0].shape == request(name, k, 0).tensors[0].shape;
        }
        EXPECT_EQ(outcome.failed.count(text), agree ? 0u : 1u) << "seed " << seed << " " << text << " request " << k;
        --left;
      }
    }
  }
}

// It is ready with the answer to what this rank had said before, and is over when the next round begins.
TEST(Agreement, WhoAsksForWhomItWaitsJustBeforeTheAnswerSaysNothingMore) {
  Ranks ranks(2);
  for (int step = 0; step < 3; ++step) {
    ranks.submit_everywhere("x", allreduce(3));
    const bool asks = step == 1;
    const Outcome outcome = ranks.round([&](Negotiation& table) {
      std::vector<Negotiation::Stalled> stalled;
      if (asks) table.find_stalled(1, 0, &stalled);
    });
    EXPECT_EQ(outcome.ready, Names{"x"}) << step;
    EXPECT_TRUE(ranks.round().ready.empty()) << step;
  }
}

TEST(Agreement, ANameInFlightIsRefusedAndAClosedTableTakesNothing) {
  Ranks ranks(1);
  EXPECT_TRUE(ranks.submit(0, "t", allreduce(1)));
  EXPECT_FALSE(ranks.submit(0, "t", allreduce(1)));
  EXPECT_EQ(ranks.round().ready, Names{"t"});
  EXPECT_TRUE(ranks.submit(0, "t", allreduce(1)));
  Negotiation table(0, {0}, [] { return nullptr; });
  Entry entry, late;
  EXPECT_EQ(table.submit("t", &entry), Negotiation::Submitted::kYes);
  std::vector<Entry*> pending;
  table.take_pending(true, &pending);
  EXPECT_EQ(pending, std::vector<Entry*>{&entry});
  EXPECT_EQ(table.submit("u", &late), Negotiation::Submitted::kClosed);
}

}  // namespace
