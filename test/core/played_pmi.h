// mpirun's side of PMI-1, played by a thread of the test.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace perseus_test {

using Variables = std::map<std::string, std::string>;

// For `size` ranks of one host, whose ends are descriptors, as mpirun leaves them.
class PlayedPmi {
 public:
  explicit PlayedPmi(int size, size_t most_bytes = 1024) : most_bytes_(most_bytes) {
    for (int rank = 0; rank < size; ++rank) {
      int ends[2];
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      ours_.push_back(ends[0]);
      theirs_.push_back(ends[1]);
    }
    received_.resize(ours_.size());
    thread_ = std::thread([this] { serve(); });
  }
  // The ranks have closed theirs, or are given up.
  ~PlayedPmi() {
    for (const int fd : ours_) ::shutdown(fd, SHUT_RDWR);
    thread_.join();
    for (const int fd : ours_) ::close(fd);
  }

  Variables variables(int rank) const {
    return {{"PMI_RANK", std::to_string(rank)},
            {"PMI_SIZE", std::to_string(ours_.size())},
            {"MPI_LOCALRANKID", std::to_string(rank)},
            {"MPI_LOCALNRANKS", std::to_string(ours_.size())},
            {"PMI_FD", std::to_string(theirs_[static_cast<size_t>(rank)])}};
  }
  int theirs(int rank) const { return theirs_[static_cast<size_t>(rank)]; }
  int finished() const { return finished_; }
  // All that the ranks have left, once they have finished.
  std::string told() const {
    std::string text;
    for (const auto& [key, value] : values_) text += key + "=" + value + "\n";
    return text;
  }

 private:
  void serve() {
    std::vector<pollfd> entries;
    for (const int fd : ours_) entries.push_back({fd, POLLIN, 0});
    size_t open = entries.size();
    while (open > 0) {
      ::poll(entries.data(), entries.size(), -1);
      for (size_t rank = 0; rank < entries.size(); ++rank) {
        if (entries[rank].fd < 0 || entries[rank].revents == 0) continue;
        char data[512];
        const ssize_t n = ::recv(entries[rank].fd, data, sizeof data, 0);
        if (n <= 0) {
          entries[rank].fd = -1;
          --open;
          continue;
        }
        received_[rank].append(data, static_cast<size_t>(n));
        for (size_t end; (end = received_[rank].find('\n')) != std::string::npos;) {
          answer(rank, received_[rank].substr(0, end));
          received_[rank].erase(0, end + 1);
        }
      }
    }
  }

  static std::string word(const std::string& line, const std::string& name) {
    const size_t begin = line.find(name + "=");
    EXPECT_NE(begin, std::string::npos) << line;
    return line.substr(begin + name.size() + 1, line.find(' ', begin) - begin - name.size() - 1);
  }

  void say(size_t rank, const std::string& text) {
    // In two pieces, as streams may.
    for (const std::string& part : {text.substr(0, text.size() / 2), text.substr(text.size() / 2) + "\n"})
      EXPECT_EQ(::send(ours_[rank], part.data(), part.size(), MSG_NOSIGNAL), static_cast<ssize_t>(part.size()));
  }

  void answer(size_t rank, const std::string& line) {
    const std::string command = word(line, "cmd");
    if (command == "init") say(rank, "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1");
    else if (command == "get_maxes")
      say(rank, "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=" + std::to_string(most_bytes_));
    else if (command == "get_my_kvsname") say(rank, "cmd=my_kvsname rc=0 kvsname=kvs_7");
    else if (command == "put") {
      EXPECT_EQ(word(line, "kvsname"), "kvs_7");
      values_[word(line, "key")] = word(line, "value");
      say(rank, "cmd=put_result rc=0 msg=success");
    } else if (command == "get") {
      const auto found = values_.find(word(line, "key"));
      say(rank, found == values_.end() ? "cmd=get_result rc=-1 msg=key_not_found"
                                       : "cmd=get_result rc=0 msg=success value=" + found->second);
    } else if (command == "barrier_in") {
      if (++waiting_ < ours_.size()) return;
      waiting_ = 0;
      for (size_t each = 0; each < ours_.size(); ++each) say(each, "cmd=barrier_out rc=0");
    } else if (command == "finalize") {
      ++finished_;
      say(rank, "cmd=finalize_ack rc=0");
    } else {
      ADD_FAILURE() << "unknown request: " << line;
    }
  }

  size_t most_bytes_;
  std::vector<int> ours_, theirs_;
  std::vector<std::string> received_;
  std::map<std::string, std::string> values_;
  size_t waiting_ = 0;
  std::atomic<int> finished_{0};
  std::thread thread_;
};

}  // namespace perseus_test
