// What ranks announce in rounds: every field arrives, docs/protocol.md says the same, nothing that arrives does harm.
#include "control/announcement.h"

#include <gtest/gtest.h>

#include <deque>
#include <fstream>
#include <functional>
#include <random>
#include <regex>
#include <sstream>

#include "control/negotiation.h"

namespace {

using namespace perseus;

// No field has its default.
Description unusual() {
  Description d;
  d.kind = Kind::kAlltoall;
  d.tensors = {{DType::kBool, {}}, {DType::kFloat16, {0, int64_t{1} << 40, 3}}};
  d.prescale = -0.125;
  d.postscale = 1e300;
  d.op = ReduceOp::kProduct;
  d.gradient = true;
  d.root = 77;
  d.ranks = {0, 5, 1000};
  d.compression.codec = {CodecKind::kTopK, 0.25, true, 7, 4, 0.5, 3, 2.0};
  d.compression.automatic = d.compression.inside = d.compression.doubles = true;
  d.compression.from = uint64_t{1} << 50;
  d.compression.momentum = 0.75;
  d.compression.masks_momentum = true;
  d.priority = -5;
  d.transient = true;
  d.nans = {1, 0};
  d.times = {7, UINT32_MAX};
  d.flush = Flush::kAmongAll;
  d.warms_up = true;
  d.new_momenta = d.stays_on_device = d.proportional = true;
  d.outdated = 1 << 30;
  d.refusal = "läuft nicht";
  return d;
}

std::vector<Message> read_all(const std::string& blob) {
  std::vector<Message> messages;
  AnnouncementReader reader(blob);
  while (!reader.at_end()) messages.push_back(reader.next());
  return messages;
}

// One message of every kind, each with its fields in use.
std::string every_message() {
  std::string blob;
  append_request("näme", unusual(), &blob);
  append_message(LeaveSchedule{0xfedcba9876543210, uint64_t{1} << 40}, &blob);
  append_message(Blocked{"a, b"}, &blob);
  return blob;
}

TEST(Announcement, RoundTripsEveryField) {
  std::string blob = every_message();
  append_request("", Description(), &blob);
  const std::vector<Message> messages = read_all(blob);
  ASSERT_EQ(messages.size(), 4u);
  const Request& request = std::get<Request>(messages[0]);
  EXPECT_EQ(request.name, "näme");
  EXPECT_EQ(to_text(request.description), to_text(unusual()));
  EXPECT_TRUE(same_request(request.description, unusual()));
  EXPECT_EQ(std::get<LeaveSchedule>(messages[1]).schedule, 0xfedcba9876543210);
  EXPECT_EQ(std::get<LeaveSchedule>(messages[1]).begun, uint64_t{1} << 40);
  EXPECT_EQ(std::get<Blocked>(messages[2]).waits_for, "a, b");
  EXPECT_EQ(std::get<Request>(messages[3]).name, "");
  EXPECT_EQ(to_text(std::get<Request>(messages[3]).description), to_text(Description()));
}

TEST(Announcement, PrintsEveryFieldWithItsValue) {
  EXPECT_EQ(to_text(unusual()),
            "kind=ALLTOALL tensors=[{dtype=bool shape=[]}, {dtype=float16 shape=[0, 1099511627776, 3]}] "
            "prescale=-0.125 postscale=1e+300 op=5 gradient=true root=77 ranks=[0, 5, 1000] "
            "compression={codec={kind=top-k ratio=0.25 half_values=true warm_up=7 every=4 momentum=0.5 "
            "matrix_rank=3 scale=2} automatic=true inside=true doubles=true from=1125899906842624 momentum=0.75 "
            "masks_momentum=true} priority=-5 transient=true nans=[1, 0] times=[7, 4294967295] flush=2 warms_up=true "
            "new_momenta=true stays_on_device=true proportional=true outdated=1073741824 refusal='läuft nicht'");
}

// Calls change(field name, description) for a description that differs from unusual() in just this field.
template <typename Part, typename Of, typename Check>
void change_each_field(Of&& part_of, Check&& check) {
  for_each_field<Part>([&](const auto& field) {
    Description changed = unusual(), plain;
    part_of(changed).*field.member = part_of(plain).*field.member;
    check(field.name, changed);
  });
}

TEST(Announcement, RequestsThatDifferInATermAreNotTheSame) {
  const auto differs = [](const char* field, const Description& changed) {
    EXPECT_FALSE(same_request(unusual(), changed)) << field;
  };
  change_each_field<RequestTerms>([](Description& d) -> RequestTerms& { return d; }, differs);
  change_each_field<CompressionTerms>([](Description& d) -> CompressionTerms& { return d.compression; }, differs);
  change_each_field<CodecSpec>([](Description& d) -> CodecSpec& { return d.compression.codec; }, differs);
  change_each_field<RequestNotes>([](Description& d) -> RequestNotes& { return d; },
                                  [](const char* field, const Description& changed) {
                                    // What no longer stays on its device is told; what newly does, is not worth a word.
                                    const bool proportional = std::string(field) == "proportional";
                                    const bool same = std::string(field) != "stays_on_device" && !proportional;
                                    EXPECT_EQ(same_request(unusual(), changed), same) << field;
                                    EXPECT_NE(same_request(changed, unusual()), proportional) << field;
                                  });
}

// ---- docs/protocol.md ----

// The right side of a line of the page's grammar, without its comment.
std::string documented(const std::string& name) {
  std::ifstream file(PERSEUS_PROTOCOL_PAGE);
  std::stringstream page;
  page << file.rdbuf();
  std::string text = page.str();
  text.erase(0, text.find("\n## Rounds\n"));
  std::smatch found;
  if (!std::regex_search(text, found, std::regex("\n" + name + " +=([^;\n]*)"))) return "no line '" + name + " ='";
  return std::regex_replace(found[1].str(), std::regex("^ +| +$"), "");
}

// What the page calls the structs that are fields of others.
std::string name_of(const TensorDescription&) { return "tensor"; }
std::string name_of(const CodecSpec&) { return "codec"; }
template <typename T>
std::string name_of(const T&);
template <typename T>
std::string name_of(const std::vector<T>&) {
  return name_of(T()) + "*";
}
template <typename T>
std::string name_of(const T&) {
  return WireValue<T>::kName;
}

template <typename Struct>
std::string listed() {
  std::string line;
  for_each_field<Struct>([&](const auto& field) {
    line += (line.empty() ? "" : " ") + std::string(field.name) + ":" + name_of(Struct().*field.member);
  });
  return line;
}

TEST(Announcement, TheProtocolPageListsTheFieldsOfTheCode) {
  EXPECT_EQ(documented("request"), "name:text terms:terms compression:compression notes:notes");
  EXPECT_EQ(documented("terms"), listed<RequestTerms>());
  EXPECT_EQ(documented("tensor"), listed<TensorDescription>());
  EXPECT_EQ(documented("compression"), listed<CompressionTerms>());
  EXPECT_EQ(documented("codec"), listed<CodecSpec>());
  EXPECT_EQ(documented("notes"), listed<RequestNotes>());
  EXPECT_EQ(documented("leave_schedule"), listed<LeaveSchedule>());
  EXPECT_EQ(documented("blocked"), listed<Blocked>());
}

// Walks over a message by the page alone.
class PageReader {
 public:
  explicit PageReader(const std::string& blob) : blob_(blob) {}
  bool at_end() const { return at_ == blob_.size(); }
  uint64_t number(size_t bytes) {
    uint64_t value = 0;
    if (bytes > blob_.size() - at_) throw std::out_of_range("the page promises more than is there");
    for (size_t i = 0; i < bytes; ++i) value |= uint64_t{static_cast<unsigned char>(blob_[at_ + i])} << 8 * i;
    at_ += bytes;
    return value;
  }
  void line(const std::string& name) {
    std::istringstream fields(documented(name));
    for (std::string field; fields >> field;) value(field.substr(field.find(':') + 1));
  }

 private:
  void value(const std::string& type) {
    if (type.back() == '*') {
      for (uint64_t left = number(4); left > 0; --left) value(type.substr(0, type.size() - 1));
    } else if (type == "text") {
      for (uint64_t left = number(4); left > 0; --left) number(1);
    } else if (type == "u8") {
      number(1);
    } else if (type == "i32" || type == "u32") {
      number(4);
    } else if (type == "i64" || type == "u64" || type == "f64") {
      number(8);
    } else {
      line(type);
    }
  }
  const std::string& blob_;
  size_t at_ = 0;
};

TEST(Announcement, CanBeReadByTheProtocolPageAlone) {
  EXPECT_EQ(documented("message"), "0 request | 1 leave_schedule | 2 blocked");
  const std::string blob = every_message();
  PageReader reader(blob);
  for (const char* name : {"request", "leave_schedule", "blocked"}) {
    EXPECT_EQ(reader.number(1), std::string(name) == "request" ? 0u : std::string(name) == "blocked" ? 2u : 1u);
    reader.line(name);
  }
  EXPECT_TRUE(reader.at_end());
}

// ---- what others may send ----

// Did reading end with the error that it should end with?
bool refused(const std::string& bytes) {
  try {
    read_all(bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo) << error.what();
    return true;
  }
  return false;
}

TEST(Announcement, EveryCutIsNoticed) {
  std::string request, leave, blocked;
  append_request("näme", unusual(), &request);
  append_message(LeaveSchedule{3, 4}, &leave);
  append_message(Blocked{"a, b"}, &blocked);
  for (const std::string& blob : {request, leave, blocked}) {
    EXPECT_FALSE(refused(blob));
    for (size_t n = 1; n < blob.size(); ++n) EXPECT_TRUE(refused(blob.substr(0, n))) << n << " of " << blob.size();
  }
}

TEST(Announcement, WhateverArrivesIsReadOrRefused) {
  const std::string blob = every_message();
  std::mt19937 random(5);
  int count = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = blob;
    for (unsigned flips = 1 + random() % 4; flips > 0; --flips)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    count += refused(bytes) ? 1 : 0;
  }
  EXPECT_GT(count, 1000);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes(random() % 40, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random() % 4);
    refused(bytes);
  }
}

TEST(Announcement, UnknownMessagesAndHugeLengthsAreRefused) {
  EXPECT_TRUE(refused(std::string("\x03", 1)));
  EXPECT_TRUE(refused(std::string("\xff", 1)));
  EXPECT_TRUE(refused(std::string("\x02\xff\xff\xff\xff", 5)));
  EXPECT_TRUE(refused(std::string("\x00\xff\xff\xff\xff", 5)));
  std::string blob;
  append_request("", Description(), &blob);
  const size_t tensors = 1 + 4 + 1;  // tag, name, kind
  blob.replace(tensors, 4, "\xff\xff\xff\x7f");
  EXPECT_TRUE(refused(blob)) << "two thousand million tensors";
}

TEST(Announcement, ChoicesThatDoNotExistAreRefused) {
  std::string blob;
  append_request("", Description(), &blob);
  blob[5] = static_cast<char>(kNegotiatedKinds);  // its kind
  EXPECT_TRUE(refused(blob));
  Description d = unusual();
  d.nans = {2};
  blob.clear();
  append_request("", d, &blob);
  EXPECT_TRUE(refused(blob)) << "a NaN in the third of two tensors";
}

// ---- messages at the wrong time, or with the wrong content ----

// A group of three that has frozen the schedule of one allreduce, seen from its rank 1.
class Frozen {
 public:
  Frozen() : table_(1, {4, 6, 9}, [this] { return &stand_ins_.emplace_back(); }, [](const Entry&) { return true; }) {
    while (!table_.scheduled() && rounds_ < 20) {
      std::string described;
      append_request("t", small(), &described);
      submit();
      if (rounds_ == 0) apply({described, described, described});
      else apply({"", "", ""}, 1);
    }
  }
  Negotiation& table() { return table_; }
  uint64_t begin_batch() {
    submit();
    Batch batch;
    std::vector<Entry*> begun;
    EXPECT_TRUE(table_.begin_batch(&batch, &begun));
    return batch.schedule;
  }
  void apply(const std::vector<std::string>& announced, uint64_t bits = 0) {
    ++rounds_;
    RoundContent content;
    content.announced.resize(3);
    table_.snapshot(&content);
    content.announced = announced;
    content.bits.assign(content.bits.size(), bits);
    std::vector<Entry*> ready;
    std::vector<std::pair<Entry*, std::string>> failed;
    table_.apply(content, &ready, &failed);
    for (Entry* entry : ready) table_.retire(entry);
  }

 private:
  static Description small() {
    Description d;
    d.tensors.push_back({DType::kFloat32, {5}});
    return d;
  }
  void submit() {
    entries_.emplace_back().description = small();
    table_.submit("t", &entries_.back());
    table_.collect();
  }
  std::deque<Entry> entries_, stand_ins_;
  Negotiation table_;
  int rounds_ = 0;
};

std::string leaving(uint64_t schedule, uint64_t begun) {
  std::string blob;
  append_message(LeaveSchedule{schedule, begun}, &blob);
  return blob;
}

TEST(LeaveSchedule, IsTakenWhereItFitsTheScheduleInForce) {
  Frozen group;
  ASSERT_TRUE(group.table().scheduled());
  const uint64_t schedule = group.begin_batch();
  group.apply({leaving(schedule, 0), "", ""});
  EXPECT_TRUE(group.table().has_urgent_news()) << "this rank leaves it, too";
  EXPECT_FALSE(group.table().broken());
  group.apply({"", leaving(schedule, 1), leaving(schedule, 2)});
  EXPECT_TRUE(group.table().broken());
  EXPECT_EQ(group.table().begun(), (std::vector<uint64_t>{0, 1, 2}));
}

TEST(LeaveSchedule, IsAnErrorWhereItDoesNotFit) {
  const auto error_of = [](const std::function<std::vector<std::string>(uint64_t)>& announced) {
    Frozen group;
    const uint64_t schedule = group.begin_batch();
    try {
      group.apply(announced(schedule));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInternal);
      return std::string(error.what());
    }
    return std::string("none");
  };
  using Parts = std::vector<std::string>;
  EXPECT_EQ(error_of([](uint64_t schedule) { return Parts{leaving(schedule, 1), "", ""}; }), "none");
  const std::string expected = "rank 4 leaves a schedule that is not the one in force";
  const auto names_rank_4 = [&](const std::string& text) { return text.find(expected) != std::string::npos; };
  EXPECT_TRUE(names_rank_4(error_of([](uint64_t schedule) { return Parts{leaving(schedule + 1, 1), "", ""}; })));
  EXPECT_TRUE(names_rank_4(error_of([](uint64_t schedule) { return Parts{leaving(schedule, 3), "", ""}; })));
  EXPECT_TRUE(names_rank_4(error_of([](uint64_t schedule) { return Parts{leaving(schedule, UINT64_MAX), "", ""}; })));
  EXPECT_TRUE(names_rank_4(
      error_of([](uint64_t schedule) { return Parts{leaving(schedule, 1) + leaving(schedule, 1), "", ""}; })));
}

TEST(LeaveSchedule, ANameOfTheScheduleIsNotDescribedWithoutIt) {
  Frozen group;
  ASSERT_TRUE(group.table().scheduled());
  Description d;
  d.tensors.push_back({DType::kFloat32, {6}});
  std::string blob;
  append_request("t", d, &blob);
  try {
    group.apply({"", "", blob});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 9 describes t (kind=ALLREDUCE tensors=[{dtype=float32 shape=[6]}]"),
              std::string::npos)
        << error.what();
  }
}

TEST(Blocked, OneRankThatSaysItTwiceIsNoDeadlock) {
  std::deque<Entry> entries(1);
  Negotiation table(0, {0, 1}, [] { return nullptr; });
  table.submit("t", &entries[0]);
  table.collect();
  std::string once;
  append_message(Blocked{"t"}, &once);
  std::vector<Entry*> ready;
  std::vector<std::pair<Entry*, std::string>> failed;
  RoundContent content;
  content.announced.resize(2);
  table.snapshot(&content);
  content.announced = {"", once + once};
  table.apply(content, &ready, &failed);
  EXPECT_TRUE(failed.empty());
  content.announced = {once, once};
  table.apply(content, &ready, &failed);
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_NE(failed[0].second.find("\n0: [t]\n1: [t]"), std::string::npos) << failed[0].second;
}

}  // namespace
