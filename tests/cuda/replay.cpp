// Runs one recorded step through the launchers over the simulation and compares it with the recorded answer.
//
//   replay FILE ORDER COPIES WORKERS      orders and copies as paged_sim_configure() numbers them
//
// A process of its own, so that a sanitizer, or a kernel with a planted fault, ends it and not the test. Every array
// is a heap block of its exact size. Prints one line; exit code 0 means equal, 1 a difference, 2 a fault.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "cuda/api.h"
#include "sim/simt.h"

using namespace paged::cuda;

namespace {

struct Array {
  std::unique_ptr<char, void (*)(void*)> bytes{nullptr, std::free};
  size_t size = 0;
};
std::map<std::string, Array> arrays;
std::map<std::string, double> numbers;

// Lines "name bytes count", each followed by that many bytes, and "name number value".
void read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string name, kind;
  while (file >> name >> kind) {
    if (kind == "number") {
      file >> numbers[name];
      continue;
    }
    Array& array = arrays[name];
    file >> array.size;
    file.get();
    // A size that is no multiple of 16 would put the end of the block past the end of the array.
    array.bytes.reset(static_cast<char*>(std::malloc(array.size)));
    file.read(array.bytes.get(), std::streamsize(array.size));
    if (!file) throw std::runtime_error("the file ends inside " + name);
  }
}

template <class T>
T* get(const char* name) {
  const auto found = arrays.find(name);
  return found == arrays.end() || !found->second.size ? nullptr : reinterpret_cast<T*>(found->second.bytes.get());
}

int integer(const char* name) { return int(numbers.at(name)); }

// The largest difference; NaN and infinity count as infinite unless both sides have the same.
double difference(const char* got_name, const char* want_name) {
  const float *got = get<float>(got_name), *want = get<float>(want_name);
  double worst = 0;
  for (size_t i = 0; i < arrays[want_name].size / 4; ++i) {
    if (got[i] == want[i]) continue;
    const double d = std::fabs(double(got[i]) - double(want[i]));
    worst = std::isfinite(d) ? std::fmax(worst, d) : INFINITY;
  }
  return worst;
}

int replay() {
  const Pool pool{get<void>("pages"),        int64_t(numbers.at("num_pages")), integer("layers"),
                  integer("kv_heads"),       integer("page_size"),             integer("head_dim"),
                  Type(integer("type"))};
  const int layer = integer("layer");
  const Rows rows{get<void>("k"), get<void>("v"), get<int64_t>("slots"), int64_t(numbers.at("num_rows")), true};
  if (append(pool, layer, rows, nullptr)) throw std::runtime_error("append was refused");
  if (copy_pages(pool, get<int>("from"), get<int>("to"), integer("copies"), nullptr))
    throw std::runtime_error("copy_pages was refused");
  if (std::memcmp(get<void>("pages"), get<void>("want_pages"), arrays["pages"].size)) {
    std::printf("DIFFERENT pages after append and copy\n");
    return 1;
  }
  const Query query{get<void>("q"),  get<void>("out"),           get<float>("lse"),
                    integer("heads"), true,                       float(numbers.at("scale")),
                    integer("window"), float(numbers.at("softcap"))};
  const Item* items = get<Item>("items");
  Work work{};
  work.wide = items;
  work.num_wide = integer("num_wide");
  work.narrow = items + work.num_wide;
  work.num_narrow = integer("num_narrow");
  work.simple = work.narrow + work.num_narrow;
  work.num_simple = integer("num_simple");
  work.rows = get<int>("rows");
  work.positions = get<int>("positions");
  work.tables = get<int>("tables");
  work.part_base = get<int>("part_base");
  work.merges = get<Merge>("merges");
  work.num_merges = integer("num_merges");
  work.partials = get<float>("partials");
  work.folds = integer("folds") != 0;
  if (attend(pool, layer, query, work, nullptr)) throw std::runtime_error("attend was refused");
  const double out = difference("out", "want_out"), lse = difference("lse", "want_lse");
  const bool equal = out < numbers.at("tolerance") && lse < 2 * numbers.at("tolerance");
  std::printf("%s out %.2e lse %.2e\n", equal ? "EQUAL" : "DIFFERENT", out, lse);
  return equal ? 0 : 1;
}

}  // namespace

int main(int, char** args) {
  try {
    read(args[1]);
    sim::config() = {static_cast<sim::Order>(std::atoi(args[2])), static_cast<sim::Copies>(std::atoi(args[3])),
                     std::atoi(args[4]), 1};
    return replay();
  } catch (const std::exception& e) {
    std::printf("FAULT %s\n", e.what());
    return 2;
  }
}
