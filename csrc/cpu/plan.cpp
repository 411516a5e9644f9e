#include "paged/plan.h"

#include <algorithm>
#include <climits>
#include <cstring>

namespace paged {
namespace {

// One tile of K and V costs about as much to read as kTileCost query vectors cost to compute.
constexpr int64_t kTileCost = 12;
constexpr int kItemsPerThread = 6;   // an item costs at most this part of a thread's share, so that all end together
constexpr int kMinSharedTiles = 2;   // a shorter common prefix is not worth a work item of its own

// Positions that row `row` of a sequence sees are lo..hi.
int row_end(const Batch& b, int seq, int row) { return b.kv_lens[seq] - (b.q_indptr[seq + 1] - 1 - row); }

int row_start(int hi, int window) { return window > 0 && hi > window ? hi - window : 0; }

int tiles(int positions) { return (positions + kTile - 1) / kTile; }

// Sequences of `members` that read the same leading pages together.
struct Cohort {
  std::vector<int32_t> members;
  int32_t shared_tiles = 0;
};

class Builder {
 public:
  Builder(const Batch& batch, Partition& out) : b_(batch), p_(out), cut_(out.cut), group_(cut_.q_heads / cut_.kv_heads) {}

  void build() {
    check_pages();
    for (const Cohort& c : cohorts()) add_cohort(c);
    cut_items();
    std::stable_sort(costs_.begin(), costs_.end(), [](const auto& x, const auto& y) { return x.first > y.first; });
    p_.items.reserve(costs_.size());
    for (const auto& [cost, item] : costs_) p_.items.push_back(item);
  }

 private:
  int q_len(int seq) const { return b_.q_indptr[seq + 1] - b_.q_indptr[seq]; }
  const int32_t* table(int seq) const { return b_.page_table + int64_t(seq) * b_.max_pages; }
  int num_pages(int seq) const { return (b_.kv_lens[seq] + b_.page_size - 1) / b_.page_size; }

  void check_pages() {
    int32_t low = INT_MAX, high = -1;
    for (int s = 0; s < b_.num_seqs; ++s) {
      if (q_len(s) == 0) continue;
      const int32_t* t = table(s);
      const int first = row_start(row_end(b_, s, b_.q_indptr[s]), cut_.window) / b_.page_size;
      for (int i = first, n = num_pages(s); i < n; ++i) {
        low = std::min(low, t[i]);
        high = std::max(high, t[i]);
      }
    }
    p_.min_page = high < 0 && low == INT_MAX ? 0 : low;
    p_.max_page = high;
  }

  // Every sequence alone, but for those that share enough leading pages with a neighbour in the order of their tables.
  std::vector<Cohort> cohorts() const {
    std::vector<Cohort> result;
    std::vector<int32_t> sharers;
    const int least_pages = (kMinSharedTiles * kTile + b_.page_size - 1) / b_.page_size;
    for (int s = 0; s < b_.num_seqs; ++s) {
      if (q_len(s) == 0) continue;
      const bool small = q_len(s) * group_ * 2 <= cut_.block_vectors;
      if (cut_.cascade && cut_.window == 0 && small && b_.kv_lens[s] / b_.page_size >= least_pages) sharers.push_back(s);
      else result.push_back({{s}, 0});
    }
    std::sort(sharers.begin(), sharers.end(), [&](int x, int y) {
      const int32_t *tx = table(x), *ty = table(y);
      const int nx = num_pages(x), ny = num_pages(y), n = std::min(nx, ny);
      const auto [ix, iy] = std::mismatch(tx, tx + n, ty);
      if (ix != tx + n) return *ix < *iy;
      return nx != ny ? nx < ny : x < y;
    });
    for (size_t i = 0; i < sharers.size();) {
      Cohort c{{sharers[i]}, 0};
      int rows = q_len(sharers[i]);
      // Reading `shared` positions once for k sequences saves k - 1 reads: a newcomer must not make that less.
      int64_t shared = b_.kv_lens[sharers[i]], saved = 0;
      for (++i; i < sharers.size(); ++i) {
        const int next = sharers[i];
        const int64_t common = std::min<int64_t>(shared, common_positions(c.members[0], next));
        const int64_t save = int64_t(c.members.size()) * common;
        if (common < kMinSharedTiles * kTile || save < saved || (rows + q_len(next)) * group_ > cut_.block_vectors) break;
        c.members.push_back(next);
        rows += q_len(next);
        shared = common;
        saved = save;
      }
      if (c.members.size() > 1) c.shared_tiles = int32_t(shared / kTile);
      result.push_back(std::move(c));
    }
    return result;
  }

  int64_t common_positions(int x, int y) const {
    const int n = std::min(num_pages(x), num_pages(y));
    const int32_t* t = table(x);
    const int64_t pages = std::mismatch(t, t + n, table(y)).first - t;
    return std::min<int64_t>({pages * b_.page_size, b_.kv_lens[x], b_.kv_lens[y]});
  }

  void add_cohort(const Cohort& c) {
    if (c.members.size() > 1) {
      const int32_t seg0 = int32_t(p_.segments.size());
      for (int s : c.members) add_segment(s, b_.q_indptr[s], b_.q_indptr[s + 1]);
      add_items(seg0, int32_t(p_.segments.size()), c.shared_tiles);
      p_.shared_seqs += int32_t(c.members.size());
      return;
    }
    const int s = c.members[0];
    const int rows = std::max(1, cut_.block_vectors / group_);
    for (int row = b_.q_indptr[s]; row < b_.q_indptr[s + 1]; row += rows) {
      const int32_t seg0 = int32_t(p_.segments.size());
      add_segment(s, row, std::min(row + rows, b_.q_indptr[s + 1]));
      add_items(seg0, seg0 + 1, 0);
    }
  }

  void add_segment(int seq, int row0, int row1) {
    const int first = row_start(row_end(b_, seq, row0), cut_.window) / kSplit;
    const int end = (row_end(b_, seq, row1 - 1) + kSplit - 1) / kSplit;
    p_.segments.push_back({seq, row0, row1, first, std::max(1, end - first), -1});
  }

  void add_items(int32_t seg0, int32_t seg1, int32_t shared_tiles) {
    int32_t split0 = INT_MAX, split1 = 0, vectors = 0;
    for (int32_t i = seg0; i < seg1; ++i) {
      const Segment& s = p_.segments[i];
      split0 = std::min(split0, s.first_split);
      split1 = std::max(split1, s.first_split + s.num_splits);
      vectors += (s.row1 - s.row0) * group_;
    }
    const Item item{seg0, seg1, 0, cut_.kv_heads, split0, split1, shared_tiles};
    p_.most_vectors = std::max(p_.most_vectors, vectors * cut_.kv_heads);
    const int64_t cost = item_cost(item);
    p_.cost += cost;
    costs_.emplace_back(cost, item);
  }

  int64_t item_cost(const Item& item) const {
    int64_t cost = 1, vectors = 0;
    const int t0 = item.split0 * kTilesPerSplit, limit = item.split1 * kTilesPerSplit;
    const int shared = std::min(item.shared_tiles, limit);
    for (int32_t i = item.seg0; i < item.seg1; ++i) {
      const Segment& s = p_.segments[i];
      const int64_t n = int64_t(s.row1 - s.row0) * group_;
      const int lo = row_start(row_end(b_, s.seq, s.row0), cut_.window) / kTile;
      const int own = std::min(tiles(row_end(b_, s.seq, s.row1 - 1)), limit) - std::max({t0, lo, shared});
      cost += std::max(0, own) * (kTileCost + n);
      vectors += n;
    }
    cost += std::max(0, shared - t0) * (kTileCost + vectors);
    return cost * (item.kv_head1 - item.kv_head0);
  }

  // Divide what is too large for an even share among the threads: many rows by their kv heads first, which costs
  // nothing; a single row by its keys first, so that its pages are read as they lie in memory.
  void cut_items() {
    const int64_t share = std::max<int64_t>(p_.cost / (int64_t(cut_.threads) * kItemsPerThread), 1);
    std::vector<std::pair<int64_t, Item>> result;
    for (const auto& [cost, item] : costs_) {
      const Segment& first = p_.segments[item.seg0];
      const bool single = item.seg1 - item.seg0 == 1 && first.row1 - first.row0 == 1;
      const int most_splits = item.split1 - item.split0, most_heads = item.kv_head1 - item.kv_head0;
      const int64_t parts = cut_.threads < 2 ? 1 : (cost + share - 1) / share;
      int splits, heads;
      if (single) {
        splits = int(std::min<int64_t>(parts, most_splits));
        heads = int(std::min<int64_t>((parts + splits - 1) / splits, most_heads));
      } else {
        heads = most_heads;
        splits = int(std::min<int64_t>((parts + heads - 1) / heads, most_splits));
      }
      // Every split of every vector is kept, since they are merged from left to right. Many rows over very many keys
      // would take gigabytes; they are many items without that.
      if (splits > 1 && p_.partial_vectors + partials(item) > kMostPartials) {
        splits = 1;
        heads = int(std::min<int64_t>(parts, most_heads));
      }
      for (int i = 0; i < splits * heads; ++i) {
        Item cut = item;
        const int h = i % heads, s = i / heads;
        cut.kv_head0 = item.kv_head0 + most_heads * h / heads;
        cut.kv_head1 = item.kv_head0 + most_heads * (h + 1) / heads;
        cut.split0 = item.split0 + int(int64_t(most_splits) * s / splits);
        cut.split1 = item.split0 + int(int64_t(most_splits) * (s + 1) / splits);
        result.emplace_back(item_cost(cut), cut);
      }
      if (splits > 1)
        for (int32_t s = item.seg0; s < item.seg1; ++s) keep_partials(s);
    }
    costs_ = std::move(result);
  }

  int64_t partials(const Segment& s) const { return int64_t(s.row1 - s.row0) * group_ * s.num_splits * cut_.kv_heads; }

  int64_t partials(const Item& item) const {
    int64_t count = 0;
    for (int32_t s = item.seg0; s < item.seg1; ++s) count += partials(p_.segments[s]);
    return count;
  }

  void keep_partials(int32_t segment) {
    Segment& s = p_.segments[segment];
    s.partial = p_.partial_vectors;
    p_.partial_vectors += partials(s);
    for (int h = 0; h < cut_.kv_heads; ++h) p_.merges.push_back(segment * cut_.kv_heads + h);
  }

  const Batch& b_;
  Partition& p_;
  const Cut& cut_;
  const int group_;
  std::vector<std::pair<int64_t, Item>> costs_;
};

}  // namespace

const char* Plan::problem(const Batch& b) {
  if (b.page_size < 1) return "page_size must be at least 1";
  if (b.q_indptr[0] != 0 || b.q_indptr[b.num_seqs] != b.num_rows) return "q_indptr must rise from 0 to the number of rows";
  for (int s = 0; s < b.num_seqs; ++s) {
    const int64_t rows = int64_t(b.q_indptr[s + 1]) - b.q_indptr[s];
    if (rows < 0) return "q_indptr must rise from 0 to the number of rows";
    if (b.kv_lens[s] < rows && !(b.kv_lens[s] == 0 && rows == 1)) return "a sequence has more new rows than positions";
    if (b.kv_lens[s] > int64_t(b.max_pages) * b.page_size) return "the page table has too few columns for a sequence";
  }
  return nullptr;
}

Plan::Plan(const Batch& batch) : batch_(batch) {
  for (int32_t i = 0; i < batch.num_rows; ++i) {
    min_slot_ = std::min(min_slot_, batch.slots[i]);
    max_slot_ = std::max(max_slot_, batch.slots[i]);
  }
}

const Partition& Plan::partition(const Cut& cut) {
  for (const auto& p : partitions_)
    if (p->cut == cut) return *p;
  auto p = std::make_unique<Partition>();
  p->cut = cut;
  Builder(batch_, *p).build();
  partitions_.push_back(std::move(p));
  return *partitions_.back();
}

}  // namespace paged
