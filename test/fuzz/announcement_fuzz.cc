// What a rank announces in a negotiation round. What was understood is written again as it was read.
#include "control/announcement.h"
#include "fuzz.h"

using namespace perseus;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string blob(reinterpret_cast<const char*>(data), size);
  std::string again;
  try {
    AnnouncementReader reader(blob);
    while (!reader.at_end()) {
      const Message message = reader.next();
      if (const Request* request = std::get_if<Request>(&message)) {
        append_request(request->name, request->description, &again);
        check_alone(request->description);
        find_mismatch(request->name, {request->description, request->description}, {0, 1});
        same_request(request->description, request->description);
      } else if (const LeaveSchedule* leave = std::get_if<LeaveSchedule>(&message)) {
        append_message(*leave, &again);
      } else {
        append_message(std::get<Blocked>(message), &again);
      }
    }
  } catch (const Error&) {
  }
  perseus_fuzz::expect(blob.compare(0, again.size(), again) == 0, "an announcement is written as it was read");
  return 0;
}
