#include "paged/page_lookup.h"

#include <algorithm>
#include <cstring>

namespace paged {
namespace {

constexpr size_t kFirstCapacity = 64;
constexpr int64_t kBlock = 32;  // pages whose entries are fetched ahead of their comparison
constexpr uint64_t kFirst = 0x9E3779B97F4A7C15, kSecond = 0xC2B2AE3D27D4EB4F, kThird = 0x165667B19E3779F9;

inline uint64_t fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t load(const int32_t* tokens) {
  uint64_t word;
  std::memcpy(&word, tokens, sizeof word);
  return word;
}

}  // namespace

PageLookup::PageLookup(int32_t page_size, uint64_t seed) : page_size_(page_size), seed_(seed) { clear(); }

void PageLookup::clear() {
  entries_.assign(kFirstCapacity, Entry{0, -1});
  mask_ = kFirstCapacity - 1;
  count_ = 0;
}

uint64_t PageLookup::start(int32_t parent) const {
  return parent >= 0 ? hash_of_[parent] : fold(seed_ ^ kThird, static_cast<uint32_t>(parent) ^ kFirst);
}

uint64_t PageLookup::next(uint64_t hash, const int32_t* tokens) const {
  int32_t i = 0;
  for (; i + 4 <= page_size_; i += 4) hash = fold(load(tokens + i) ^ kFirst, load(tokens + i + 2) ^ hash);
  for (; i < page_size_; ++i) hash = fold(static_cast<uint32_t>(tokens[i]) ^ kSecond, hash ^ kFirst);
  return fold(hash ^ kSecond, seed_ ^ kThird);
}

void PageLookup::place(Entry entry) {
  size_t at = entry.hash & mask_;
  while (entries_[at].node >= 0) at = (at + 1) & mask_;
  entries_[at] = entry;
}

void PageLookup::grow() {
  std::vector<Entry> old(2 * entries_.size(), Entry{0, -1});
  old.swap(entries_);
  mask_ = entries_.size() - 1;
  for (const Entry& entry : old)
    if (entry.node >= 0) place(entry);
}

void PageLookup::insert(int32_t node, int32_t parent, const int32_t* tokens) {
  if (2 * (count_ + 1) > entries_.size()) grow();
  if (static_cast<size_t>(node) >= hash_of_.size()) hash_of_.resize(std::max<size_t>(2 * hash_of_.size(), size_t(node) + 1));
  num_nodes_ = std::max(num_nodes_, size_t(node) + 1);
  const uint64_t hash = next(start(parent), tokens);
  hash_of_[node] = hash;
  place({hash, node});
  ++count_;
}

bool PageLookup::erase(int32_t node) {
  if (node < 0 || static_cast<size_t>(node) >= hash_of_.size()) return false;
  size_t at = hash_of_[node] & mask_;
  while (entries_[at].node != node) {
    if (entries_[at].node < 0) return false;
    at = (at + 1) & mask_;
  }
  // Whatever stands behind the gap and was pushed past it moves up.
  for (size_t from = (at + 1) & mask_; entries_[from].node >= 0; from = (from + 1) & mask_) {
    const size_t home = entries_[from].hash & mask_;
    if (((from - home) & mask_) >= ((from - at) & mask_)) {
      entries_[at] = entries_[from];
      at = from;
    }
  }
  entries_[at].node = -1;
  --count_;
  return true;
}

int64_t PageLookup::match(int32_t parent, const int32_t* tokens, int64_t num_pages, const int32_t* node_tokens,
                          const int32_t* node_parent, int32_t* out) const {
  const size_t bytes = sizeof(int32_t) * page_size_;
  uint64_t hash = start(parent), hashes[kBlock];
  size_t places[kBlock];
  for (int64_t first = 0; first < num_pages; first += kBlock) {
    const int64_t block = std::min(kBlock, num_pages - first);
    for (int64_t i = 0; i < block; ++i) {
      hashes[i] = hash = next(hash, tokens + (first + i) * page_size_);
      __builtin_prefetch(&entries_[hash & mask_]);
    }
    for (int64_t i = 0; i < block; ++i) {  // the first entry of equal hash is nearly always the one
      size_t at = hashes[i] & mask_;
      while (entries_[at].node >= 0 && entries_[at].hash != hashes[i]) at = (at + 1) & mask_;
      places[i] = at;
      const int32_t node = entries_[at].node;
      if (node < 0) break;
      __builtin_prefetch(node_tokens + int64_t(node) * page_size_);
      __builtin_prefetch(node_parent + node);
    }
    for (int64_t i = 0; i < block; ++i) {
      const int32_t* page = tokens + (first + i) * page_size_;
      size_t at = places[i];
      for (;; at = (at + 1) & mask_) {
        const Entry& entry = entries_[at];
        if (entry.node < 0) return first + i;
        if (entry.hash == hashes[i] && node_parent[entry.node] == parent &&
            !std::memcmp(node_tokens + int64_t(entry.node) * page_size_, page, bytes))
          break;
      }
      parent = out[first + i] = entries_[at].node;
    }
  }
  return num_pages;
}

}  // namespace paged
