// Runs a target without a fuzzer: on the inputs that it has learnt (test/fuzz/corpus), and on as many made of them by
// chance as the second argument says, always the same. Compilers without libFuzzer, and sanitizers, have it.
#include <dirent.h>

#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "fuzz.h"

namespace {

using Bytes = std::vector<uint8_t>;

std::vector<Bytes> inputs_in(const std::string& folder) {
  std::vector<std::string> names;
  if (DIR* const directory = ::opendir(folder.c_str()); directory != nullptr) {
    while (const dirent* const entry = ::readdir(directory))
      if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
    ::closedir(directory);
  }
  std::sort(names.begin(), names.end());
  std::vector<Bytes> inputs;
  for (const std::string& name : names) {
    std::ifstream file(folder + "/" + name, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

// One of the others' ends, or bytes that are changed, left out, doubled or new.
void change(Bytes* input, const std::vector<Bytes>& others, std::mt19937_64* random) {
  for (uint64_t changes = 1 + (*random)() % 8; changes > 0; --changes) {
    const size_t size = input->size(), at = size == 0 ? 0 : (*random)() % size;
    const auto place = input->begin() + static_cast<std::ptrdiff_t>(at);
    switch ((*random)() % 6) {
      case 0:
        if (size > 0) (*input)[at] = static_cast<uint8_t>((*random)());
        break;
      case 1:
        if (size > 0) (*input)[at] = static_cast<uint8_t>((*input)[at] ^ (1U << ((*random)() % 8)));
        break;
      case 2:
        input->erase(place, input->begin() + static_cast<std::ptrdiff_t>(std::min(size, at + (*random)() % 16)));
        break;
      case 3:
        input->insert(place, (*random)() % 16, static_cast<uint8_t>((*random)()));
        break;
      case 4:
        for (size_t i = at; i < std::min(size, at + 4); ++i) (*input)[i] = (*random)() % 2 == 0 ? 0xff : 0;
        break;
      case 5: {
        const Bytes& other = others[(*random)() % others.size()];
        if (other.empty()) break;
        input->resize(at);
        input->insert(input->end(), other.begin() + static_cast<std::ptrdiff_t>((*random)() % other.size()),
                      other.end());
        break;
      }
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s CORPUS INPUTS\n", arguments[0]);
    return 2;
  }
  const std::vector<Bytes> inputs = inputs_in(arguments[1]);
  if (inputs.empty()) {
    std::fprintf(stderr, "%s has no inputs\n", arguments[1]);
    return 1;
  }
  for (const Bytes& input : inputs) LLVMFuzzerTestOneInput(input.data(), input.size());
  std::mt19937_64 random(inputs.size());
  const long made = std::strtol(arguments[2], nullptr, 10);
  for (long i = 0; i < made; ++i) {
    Bytes input = inputs[random() % inputs.size()];
    change(&input, inputs, &random);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu inputs and %ld made of them\n", inputs.size(), made);
  return 0;
}
