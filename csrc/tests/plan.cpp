// How steps are cut: every split of every row is somebody's, and partial results stay within their bound.
#include <cstdio>
#include <vector>

#include "paged/plan.h"

using namespace paged;

namespace {

// Whether each split that a row has, of each kv head, lies in exactly one item.
bool covers(const Partition& p, int rows, int kv_heads, int splits) {
  std::vector<int> seen(size_t(rows) * kv_heads * splits, 0);
  for (const Item& item : p.items)
    for (int s = item.seg0; s < item.seg1; ++s)
      for (int row = p.segments[s].row0; row < p.segments[s].row1; ++row)
        for (int h = item.kv_head0; h < item.kv_head1; ++h)
          for (int k = item.split0; k < item.split1; ++k) ++seen[(size_t(row) * kv_heads + h) * splits + k];
  for (const Segment& s : p.segments)
    for (int row = s.row0; row < s.row1; ++row)
      for (int h = 0; h < kv_heads; ++h)
        for (int k = s.first_split; k < s.first_split + s.num_splits; ++k)
          if (seen[(size_t(row) * kv_heads + h) * splits + k] != 1) return false;
  return true;
}

}  // namespace

int check_plan() {
  int failed = 0;
  bool divided = false, kept_whole = false;
  for (int threads : {1, 2, 16, 128})
    for (int rows : {1, 64, 512, 2048}) {
      const int length = 131072, page_size = 16, splits = length / kSplit;
      const std::vector<int32_t> q_indptr = {0, rows}, lens = {length}, table(length / page_size, 0);
      const std::vector<int64_t> slots(rows, -1);
      const Batch batch{1, rows, page_size, length / page_size, q_indptr.data(), lens.data(), table.data(), slots.data()};
      Plan plan(batch);
      const Partition& p = plan.partition({32, 8, 0, threads, 128, true});
      divided |= rows == 1 && threads > 8 && p.items.size() > 8;
      kept_whole |= rows == 2048 && threads == 128 && p.partial_vectors <= kMostPartials;
      if (p.partial_vectors <= kMostPartials && covers(p, rows, 8, splits)) continue;
      ++failed;
      std::printf("plan of %d rows for %d threads: %lld partial results\n", rows, threads, (long long)p.partial_vectors);
    }
  std::printf("plan: %s\n", failed || !divided || !kept_whole ? "failed" : "ok");
  return failed + !divided + !kept_whole;
}
