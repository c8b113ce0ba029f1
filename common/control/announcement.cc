// Messages as their tag and their fields.
#include "control/announcement.h"

namespace perseus {
namespace {

static_assert(lists_every_member<LeaveSchedule>() && lists_every_member<Blocked>(), "fields() lists all that is sent");

enum class Tag : uint8_t { kRequest, kLeaveSchedule, kBlocked };
static_assert(
    std::is_same_v<std::variant_alternative_t<static_cast<size_t>(Tag::kRequest), Message>, Request> &&
    std::is_same_v<std::variant_alternative_t<static_cast<size_t>(Tag::kLeaveSchedule), Message>, LeaveSchedule> &&
    std::is_same_v<std::variant_alternative_t<static_cast<size_t>(Tag::kBlocked), Message>, Blocked>);

template <typename T>
void put(const T& value, std::string* blob) {
  WireValue<T>::put(value, blob);
}

void put_tag(Tag tag, std::string* blob) { blob->push_back(static_cast<char>(tag)); }

template <typename T>
T take(WireReader* from) {
  T value;
  WireValue<T>::take(from, &value);
  return value;
}

Request take_request(WireReader* from) {
  Request request;
  WireValue<std::string>::take(from, &request.name);
  Description& d = request.description;
  WireValue<RequestTerms>::take(from, &d);
  WireValue<CompressionTerms>::take(from, &d.compression);
  WireValue<RequestNotes>::take(from, &d);
  for (uint32_t tensor : d.nans)
    if (tensor >= d.tensors.size()) fail(ErrorKind::kIo, "[negotiation] announcement of a NaN in no tensor");
  return request;
}

}  // namespace

void append_request(const std::string& name, const Description& description, std::string* blob) {
  put_tag(Tag::kRequest, blob);
  put(name, blob);
  put<RequestTerms>(description, blob);
  put(description.compression, blob);
  put<RequestNotes>(description, blob);
}

void append_message(const LeaveSchedule& message, std::string* blob) {
  put_tag(Tag::kLeaveSchedule, blob);
  put(message, blob);
}

void append_message(const Blocked& message, std::string* blob) {
  put_tag(Tag::kBlocked, blob);
  put(message, blob);
}

Message AnnouncementReader::next() {
  const uint8_t tag = static_cast<uint8_t>(*reader_.take_bytes(1));
  switch (static_cast<Tag>(tag)) {
    case Tag::kRequest:
      return take_request(&reader_);
    case Tag::kLeaveSchedule:
      return take<LeaveSchedule>(&reader_);
    case Tag::kBlocked:
      return take<Blocked>(&reader_);
  }
  fail(ErrorKind::kIo, "[negotiation] announcement of an unknown message " + std::to_string(tag));
}

}  // namespace perseus
