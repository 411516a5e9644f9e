// paged._native: the CPU kernels for Python. No torch, no numpy headers: addresses and sizes, and numpy arrays for what
// is passed once a step. Shapes and dtypes of tensors are checked by paged/ops/cpu.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <stdexcept>
#include <string>

#include "paged/page_lookup.h"
#include "paged/plan.h"
#include "paged/thread_pool.h"

namespace nb = nanobind;
using namespace paged;

namespace {

using Int32s = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64s = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

bool cascade = true;

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// What a kernel divides by, or has room for.
void check_heads(int q_heads, int kv_heads) {
  require(kv_heads > 0 && q_heads > 0 && q_heads % kv_heads == 0,
          "q_heads must be a multiple of kv_heads, both positive");
}

// Large pages of the operating system for the memory of the KV pages: a step reads all of it once, in no order that a
// TLB could follow. Advice only; memory that was never written still costs nothing.
void advise_huge_pages(const Pages& p) {
#if defined(__linux__)
  const uintptr_t huge = uintptr_t(1) << 21, start = reinterpret_cast<uintptr_t>(p.base);
  const uintptr_t first = (start + huge - 1) & ~(huge - 1), end = (start + p.page_bytes() * p.num_pages) & ~(huge - 1);
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)p;
#endif
}

// A plan and the arrays that it reads.
struct BoundPlan {
  Int32s q_indptr, kv_lens;
  Table page_table;
  Int64s slots;
  Plan plan;

  static Batch batch(int page_size, const Int32s& q, const Int32s& kv, const Table& t, const Int64s& slots) {
    if (q.shape(0) != kv.shape(0) + 1 || t.shape(0) != kv.shape(0))
      throw std::invalid_argument("q_indptr, kv_lens and page_table must have S + 1, S and S rows");
    const Batch b{int32_t(kv.shape(0)), int32_t(slots.shape(0)), page_size, int32_t(t.shape(1)),
                  q.data(), kv.data(), t.data(), slots.data()};
    if (const char* wrong = Plan::problem(b)) throw std::invalid_argument(wrong);
    return b;
  }

  BoundPlan(int page_size, Int32s q, Int32s kv, Table t, Int64s s)
      : q_indptr(q), kv_lens(kv), page_table(t), slots(s), plan(batch(page_size, q, kv, t, s)) {}
};

void check_call(const BoundPlan& p, const Pages& pages, int layer, int dtype) {
  require(p.plan.batch().page_size == pages.page_size, "the plan and the pages must have one page_size");
  require(layer >= 0 && layer < pages.layers, "layer must be one of those that a page holds");
  require(dtype >= kF32 && dtype <= kBF16, "rows must be fp32, fp16 or bf16: dtype 0, 1 or 2");
}

const CpuKernels* kernels_of(const std::string& isa) {
  if (const CpuKernels* k = cpu_kernels(isa.c_str())) return k;
  throw std::invalid_argument("no kernels for the instruction set '" + isa + "' on this processor");
}

struct Kernels {
  const CpuKernels* table;

  explicit Kernels(const std::string& isa) : table(kernels_of(isa)) {}

  void attend(BoundPlan& p, const Pages& pages, int layer, uintptr_t q, int64_t q_row_stride, int q_heads, int q_dtype,
              uintptr_t out, uintptr_t lse, float scale, int window, float softcap) const {
    check_call(p, pages, layer, q_dtype);
    check_heads(q_heads, pages.kv_heads);
    require(window >= 0, "window must be 0 (off) or positive");
    const int threads = num_threads();
    const Partition& part =
        p.plan.partition({q_heads, pages.kv_heads, window, threads, table->preferred_rows, cascade});
    if (part.min_page < 0 || part.max_page >= pages.num_pages)
      throw std::invalid_argument("a page id that a row reads must be between 0 and " +
                                  std::to_string(pages.num_pages - 1) + ", got " +
                                  std::to_string(part.min_page < 0 ? part.min_page : part.max_page));
    AttendArgs a{};
    a.pages = pages, a.batch = p.plan.batch();
    a.layer = layer, a.q_heads = q_heads, a.window = window, a.scale = scale, a.softcap = softcap;
    a.q = reinterpret_cast<const void*>(q), a.q_row_stride = q_row_stride, a.q_dtype = q_dtype;
    a.out = reinterpret_cast<void*>(out), a.lse = reinterpret_cast<float*>(lse);
    nb::gil_scoped_release unlocked;
    run_attend(*table, part, a, threads);
  }

  void append(const BoundPlan& p, const Pages& pages, int layer, uintptr_t k, int64_t k_row_stride, uintptr_t v,
              int64_t v_row_stride, int src_dtype) const {
    check_call(p, pages, layer, src_dtype);
    const int64_t slots = pages.num_pages * pages.page_size;
    if (p.plan.min_slot() < -1 || p.plan.max_slot() >= slots)
      throw std::invalid_argument("slots must be -1 or below " + std::to_string(slots) + ", got " +
                                  std::to_string(p.plan.min_slot() < -1 ? p.plan.min_slot() : p.plan.max_slot()));
    const AppendArgs a{pages, layer, src_dtype, reinterpret_cast<const void*>(k), reinterpret_cast<const void*>(v),
                       k_row_stride, v_row_stride, p.plan.batch().slots};
    nb::gil_scoped_release unlocked;
    run_append(*table, a, p.plan.batch().num_rows, num_threads());
  }

  // Addresses are those of tensors laid out as DeltaArgs says; slots were checked by StatePool.
  void delta(const DeltaLayer& layer, Int32s q_indptr, Int32s slots, uintptr_t rows, int64_t row_stride,
             uintptr_t history, int64_t history_stride, uintptr_t state, int64_t state_stride, uintptr_t mixed,
             uintptr_t out) const {
    if (q_indptr.shape(0) != slots.shape(0) + 1)
      throw std::invalid_argument("q_indptr and slots must have S + 1 and S rows");
    require(q_indptr.data()[0] == 0, "q_indptr must rise from 0 to the number of rows");
    for (size_t i = 0; i < slots.shape(0); ++i)
      require(q_indptr.data()[i + 1] >= q_indptr.data()[i], "q_indptr must rise from 0 to the number of rows");
    const DeltaArgs a{&layer, int32_t(slots.shape(0)), q_indptr.data(), slots.data(),
                      reinterpret_cast<const float*>(rows), row_stride, reinterpret_cast<float*>(history),
                      reinterpret_cast<float*>(state), history_stride, state_stride, reinterpret_cast<float*>(mixed),
                      reinterpret_cast<float*>(out)};
    nb::gil_scoped_release unlocked;
    run_delta(*table, a, num_threads());
  }

  float read_each(Int64s addresses, size_t bytes) const {
    nb::gil_scoped_release unlocked;
    return run_read_each(*table, addresses.data(), int32_t(addresses.shape(0)), bytes, num_threads());
  }

  float read(uintptr_t address, size_t bytes) const {
    nb::gil_scoped_release unlocked;
    return run_read(*table, reinterpret_cast<const void*>(address), bytes, num_threads());
  }
};

void copy_pages(const Pages& pages, Int32s src, Int32s dst) {
  if (src.shape(0) != dst.shape(0)) throw std::invalid_argument("src and dst must have one length");
  for (size_t i = 0; i < src.shape(0); ++i)
    if (src.data()[i] < 0 || src.data()[i] >= pages.num_pages || dst.data()[i] < 0 || dst.data()[i] >= pages.num_pages)
      throw std::invalid_argument("page ids must be between 0 and " + std::to_string(pages.num_pages - 1));
  nb::gil_scoped_release unlocked;
  run_copy(pages, src.data(), dst.data(), int32_t(src.shape(0)), num_threads());
}

// A PageLookup whose arguments are checked.
struct BoundLookup {
  int32_t page_size;
  PageLookup lookup;

  BoundLookup(int32_t size, uint64_t seed) : page_size(size), lookup(size, seed) {
    if (size < 1) throw std::invalid_argument("page_size must be at least 1");
  }

  // The lookup keeps arrays that are indexed by nodes.
  void check_parent(int32_t parent) const {
    require(lookup.knows(parent), "a parent must be a node that is there, or a negative number that stands for a root");
  }

  void insert(int32_t node, int32_t parent, Int32s tokens) {
    if (node < 0 || tokens.shape(0) != size_t(page_size))
      throw std::invalid_argument("a node needs a number from 0 on and exactly one page of tokens");
    check_parent(parent);
    lookup.insert(node, parent, tokens.data());
  }

  // One page each, in order: a parent may be a node of the same call.
  void insert_all(Int32s nodes, Int32s parents, Table tokens) {
    if (nodes.shape(0) != parents.shape(0) || nodes.shape(0) != tokens.shape(0) || tokens.shape(1) != size_t(page_size))
      throw std::invalid_argument("nodes, parents and pages of tokens must be equally many");
    for (size_t i = 0; i < nodes.shape(0); ++i) {
      require(nodes.data()[i] >= 0, "a node needs a number from 0 on");
      check_parent(parents.data()[i]);
      lookup.insert(nodes.data()[i], parents.data()[i], tokens.data() + i * page_size);
    }
  }

  auto match(int32_t parent, Int32s tokens, int64_t num_pages, Table node_tokens, Int32s node_parent) {
    if (num_pages < 0 || num_pages > int64_t(tokens.shape(0)) / page_size || node_tokens.shape(1) != size_t(page_size) ||
        node_tokens.shape(0) != node_parent.shape(0))
      throw std::invalid_argument("match needs num_pages pages of tokens, and tokens and parent of every node");
    check_parent(parent);
    require(node_parent.shape(0) >= lookup.num_nodes(), "match needs the tokens and the parent of every node");
    auto* found = new int32_t[num_pages + 1];
    nb::capsule owner(found, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
    const int64_t n = lookup.match(parent, tokens.data(), num_pages, node_tokens.data(), node_parent.data(), found);
    return nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(found, {size_t(n)}, owner);
  }
};

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native CPU code of paged.";
  nb::set_leak_warnings(false);  // backends live until the interpreter ends

  nb::class_<Pages>(m, "Pages", "Address and geometry of the pages of one storage, which must outlive it.")
      .def("__init__", [](Pages* self, uintptr_t address, int64_t num_pages, int layers, int kv_heads, int page_size,
                          int head_dim, int dtype) {
        require(num_pages >= 0 && layers > 0 && kv_heads > 0 && page_size > 0, "a pool's sizes must be positive");
        require(head_dim > 0 && head_dim % 8 == 0 && head_dim <= kMostDim,
                "the head size must be a multiple of 8 and at most 256");
        require(dtype >= kF32 && dtype <= kInt4, "pages are fp32, fp16, bf16, int8 or int4: dtype 0 to 4");
        new (self) Pages{reinterpret_cast<char*>(address), num_pages, layers, kv_heads, page_size, head_dim, dtype};
        advise_huge_pages(*self);
      });

  nb::class_<BoundPlan>(m, "Plan", "One step: its arrays, and how it is cut into work items.")
      .def(nb::init<int, Int32s, Int32s, Table, Int64s>(), nb::arg("page_size"),
           nb::arg("q_indptr").noconvert(), nb::arg("kv_lens").noconvert(), nb::arg("page_table").noconvert(),
           nb::arg("slots").noconvert())
      .def("describe", [](BoundPlan& p, int q_heads, int kv_heads, int window) {
        check_heads(q_heads, kv_heads);
        const Partition& part = p.plan.partition({q_heads, kv_heads, window, num_threads(), 128, cascade});
        nb::dict d;
        d["items"] = part.items.size();
        d["merges"] = part.merges.size();
        d["shared_seqs"] = part.shared_seqs;
        return d;
      }, "Number of work items and of merges, and of sequences that read shared pages together.");

  nb::class_<DeltaLayer>(m, "DeltaLayer", "Sizes of a gated delta layer and addresses of its weights.")
      .def("__init__", [](DeltaLayer* self, int key_heads, int value_heads, int key_dim, int value_dim, int kernel,
                          uintptr_t conv, uintptr_t decay, uintptr_t dt_bias, uintptr_t norm, float eps) {
        require(key_heads > 0 && value_heads > 0 && value_heads % key_heads == 0 && key_dim > 0 && value_dim > 0 &&
                    kernel > 0,
                "sizes of a delta layer must be positive, and its value heads a multiple of its key heads");
        if (key_dim % kDeltaLanes || value_dim % kDeltaLanes || kernel > kMaxTaps)
          throw std::invalid_argument(
              "delta head sizes must be multiples of 8, and the convolution have at most 16 taps");
        auto at = [](uintptr_t address) { return reinterpret_cast<const float*>(address); };
        new (self) DeltaLayer{key_heads, value_heads, key_dim, value_dim, kernel, at(conv), at(decay), at(dt_bias),
                              at(norm), eps};
      });

  nb::class_<Kernels>(m, "Kernels", "The kernels of one instruction set; '' is the widest of this processor.")
      .def(nb::init<const std::string&>(), nb::arg("isa") = "")
      .def_prop_ro("isa", [](const Kernels& k) { return std::string(k.table->isa); })
      .def("attend", &Kernels::attend)
      .def("append", &Kernels::append)
      .def("delta", &Kernels::delta)
      .def("read_each", &Kernels::read_each, "The same for pieces of `bytes` bytes at each of the addresses.")
      .def("read", &Kernels::read, "Read bytes with plain vector loads on all threads: the bound of any kernel.");

  nb::class_<BoundLookup>(m, "PageLookup", "From a page's parent and tokens to its node.")
      .def(nb::init<int32_t, uint64_t>(), nb::arg("page_size"), nb::arg("seed"))
      .def("insert", &BoundLookup::insert, nb::arg("node"), nb::arg("parent"), nb::arg("tokens").noconvert())
      .def("insert_all", &BoundLookup::insert_all, nb::arg("nodes").noconvert(), nb::arg("parents").noconvert(),
           nb::arg("tokens").noconvert())
      .def("erase", [](BoundLookup& b, int32_t node) { return b.lookup.erase(node); }, nb::arg("node"))
      .def("clear", [](BoundLookup& b) { b.lookup.clear(); })
      .def("match", &BoundLookup::match, nb::arg("parent"), nb::arg("tokens").noconvert(), nb::arg("num_pages"),
           nb::arg("node_tokens").noconvert(), nb::arg("node_parent").noconvert())
      .def("__len__", [](const BoundLookup& b) { return b.lookup.size(); });

  m.def("copy_pages", &copy_pages, nb::arg("pages"), nb::arg("src").noconvert(), nb::arg("dst").noconvert());
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads);
  m.def("cascade", [] { return cascade; });
  m.def("set_cascade", [](bool on) { cascade = on; }, "Whether sequences on the same leading pages read them once.");
}
