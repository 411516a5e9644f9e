// PageLookup: from a page's parent and tokens to its node, for a whole prompt in one call. No Python.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace paged {

// A hash table from (parent, tokens) to the node of a cached page. What is looked up is a hash of all tokens from the
// root on, so that the hashes of a whole prompt are known before the first look; what decides is the node's parent and
// its tokens, which are compared. Nodes of equal hash stand side by side, so that a collision costs time and no hit.
//
// Open addressing with linear probing at most half full; an entry that leaves is filled from those behind it. The hash
// starts from `seed`, so that nobody can choose tokens that collide.
class PageLookup {
 public:
  explicit PageLookup(int32_t page_size, uint64_t seed);

  // `parent` is a node, or a negative number that stands for a root. O(page_size).
  void insert(int32_t node, int32_t parent, const int32_t* tokens);
  // Forgets a node; false if it is not there.
  bool erase(int32_t node);
  void clear();
  size_t size() const { return count_; }
  // One more than the highest number of a node that was ever inserted.
  size_t num_nodes() const { return num_nodes_; }
  // Whether a number may be a parent: a node below num_nodes, or any root.
  bool knows(int32_t parent) const { return parent < 0 || size_t(parent) < num_nodes_; }

  // The nodes of the leading pages of `tokens` (num_pages of them) below `parent`, into `out`; returns how many.
  // node_tokens [nodes, page_size] and node_parent [nodes] are those of all nodes. O(pages found) and one more.
  int64_t match(int32_t parent, const int32_t* tokens, int64_t num_pages, const int32_t* node_tokens,
                const int32_t* node_parent, int32_t* out) const;

 private:
  struct Entry {
    uint64_t hash;
    int32_t node;  // -1: empty
  };

  uint64_t start(int32_t parent) const;
  uint64_t next(uint64_t hash, const int32_t* tokens) const;
  void place(Entry entry);
  void grow();

  int32_t page_size_;
  uint64_t seed_;
  size_t count_ = 0, num_nodes_ = 0, mask_;
  std::vector<Entry> entries_;
  std::vector<uint64_t> hash_of_;  // by node
};

}  // namespace paged
