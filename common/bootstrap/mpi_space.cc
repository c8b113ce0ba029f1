// The launcher's space where MPI is going to carry the data: MPI asks the launcher itself, and only one may. What a
// rank puts becomes known to all in the next fence, an allgather.
#include <map>
#include <sstream>

#include "base/error.h"
#include "bootstrap/launcher_space.h"
#include "mpi/library.h"

namespace perseus {
namespace {

constexpr size_t kMostValue = 4096;

class MpiSpace final : public LauncherSpace {
 public:
  explicit MpiSpace(const SpaceOptions& options) : options_(options), library_(mpi::Library::open()) {
    library_->check_ranks(options.identity.rank, options.identity.size);
    communicator_ = library_->duplicate(library_->world(), options.deadline_ns, {});
  }

  void put(const std::string& key, const std::string& value) override { own_[key] = value; }
  size_t most_bytes() const override { return kMostValue; }

  void fence() override {
    std::string text;
    for (const auto& [key, value] : own_) text += key + " " + value + "\n";
    const std::vector<std::string> sizes = gather(size_text(text.size()), std::vector<size_t>(members(), kSizeDigits));
    std::vector<size_t> bytes;
    for (const std::string& size : sizes) bytes.push_back(std::stoul(size));
    all_ = gather(text, bytes);
  }

  std::string get(int rank, const std::string& key) override {
    std::istringstream lines(all_.at(static_cast<size_t>(rank)));
    for (std::string name, value; lines >> name >> value;)
      if (name == key) return value;
    fail(ErrorKind::kIo, "[rendezvous] rank " + std::to_string(rank) + " has left no " + key + " with MPI");
  }

  void finish() override { library_->free(communicator_); }

 private:
  static constexpr size_t kSizeDigits = 8;

  size_t members() const { return static_cast<size_t>(options_.identity.size); }
  static std::string size_text(size_t size) {
    const std::string digits = std::to_string(size);
    return std::string(kSizeDigits - digits.size(), '0') + digits;
  }

  // Everybody's text, of which bytes[i] come from rank i.
  std::vector<std::string> gather(const std::string& text, const std::vector<size_t>& bytes) {
    // MPI may read and write these after we have given up.
    struct Memory {
      std::string sent, gathered;
      std::vector<int> counts, places;
    };
    auto memory = std::make_unique<Memory>();
    size_t total = 0;
    for (size_t each : bytes) {
      memory->counts.push_back(static_cast<int>(each));
      memory->places.push_back(static_cast<int>(total));
      total += each;
    }
    memory->sent = text;
    memory->gathered.resize(total);
    mpi::Handle request = nullptr;
    library_->check("MPI_Iallgatherv",
                    library_->call().allgather(memory->sent.data(), static_cast<int>(text.size()), library_->bytes(),
                                               memory->gathered.data(), memory->counts.data(), memory->places.data(),
                                               library_->bytes(), communicator_, &request));
    try {
      while (!library_->test(&request)) check_patience(options_, "some rank");
    } catch (const Error&) {
      mpi::leave_unfinished();
      memory.release();
      throw;
    }
    std::vector<std::string> parts;
    for (size_t i = 0; i < bytes.size(); ++i)
      parts.push_back(memory->gathered.substr(static_cast<size_t>(memory->places[i]), bytes[i]));
    return parts;
  }

  const SpaceOptions options_;
  const std::unique_ptr<mpi::Library> library_;
  mpi::Handle communicator_ = nullptr;
  std::map<std::string, std::string> own_;
  std::vector<std::string> all_;
};

}  // namespace

std::unique_ptr<LauncherSpace> open_mpi_space(const SpaceOptions& options) {
  return std::make_unique<MpiSpace>(options);
}

}  // namespace perseus
