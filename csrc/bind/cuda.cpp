// paged._cuda: the launchers of cuda/api.h. Addresses are plain integers; no torch, no numpy headers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "../cuda/api.h"

namespace nb = nanobind;
using namespace paged::cuda;

namespace {

void check(int error) {
  if (error) throw std::runtime_error(std::string("the CUDA launch failed: ") + error_name(error));
}

// A pointer field as an integer attribute.
template <auto kField, class Record>
void address(nb::class_<Record>& type, const char* name) {
  using Pointer = std::remove_reference_t<decltype(std::declval<Record>().*kField)>;
  type.def_prop_rw(
      name, [](const Record& r) { return reinterpret_cast<uintptr_t>(r.*kField); },
      [](Record& r, uintptr_t a) { r.*kField = reinterpret_cast<Pointer>(a); });
}

template <class Record>
nb::class_<Record> record(nb::module_& m, const char* name) {
  return nb::class_<Record>(m, name).def("__init__", [](Record* self) { new (self) Record{}; });
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of paged: launchers that take addresses, sizes and a stream.";

  auto pool = record<Pool>(m, "Pool");
  address<&Pool::pages>(pool, "pages");
  pool.def_rw("num_pages", &Pool::num_pages)
      .def_rw("layers", &Pool::layers)
      .def_rw("kv_heads", &Pool::kv_heads)
      .def_rw("page_size", &Pool::page_size)
      .def_rw("head_dim", &Pool::head_dim)
      .def_prop_rw("type", [](const Pool& p) { return int(p.type); }, [](Pool& p, int t) { p.type = Type(t); });

  auto rows = record<Rows>(m, "Rows");
  address<&Rows::k>(rows, "k");
  address<&Rows::v>(rows, "v");
  address<&Rows::slots>(rows, "slots");
  rows.def_rw("num_rows", &Rows::num_rows).def_rw("fp32", &Rows::fp32);

  auto query = record<Query>(m, "Query");
  address<&Query::q>(query, "q");
  address<&Query::out>(query, "out");
  address<&Query::lse>(query, "lse");
  query.def_rw("heads", &Query::heads)
      .def_rw("fp32", &Query::fp32)
      .def_rw("scale", &Query::scale)
      .def_rw("window", &Query::window)
      .def_rw("softcap", &Query::softcap);

  auto work = record<Work>(m, "Work");
  address<&Work::wide>(work, "wide");
  address<&Work::narrow>(work, "narrow");
  address<&Work::simple>(work, "simple");
  work.def_rw("num_wide", &Work::num_wide)
      .def_rw("num_narrow", &Work::num_narrow)
      .def_rw("num_simple", &Work::num_simple);
  address<&Work::rows>(work, "rows");
  address<&Work::positions>(work, "positions");
  address<&Work::tables>(work, "tables");
  address<&Work::part_base>(work, "part_base");
  address<&Work::merges>(work, "merges");
  work.def_rw("num_merges", &Work::num_merges);
  address<&Work::partials>(work, "partials");
  work.def_rw("folds", &Work::folds);

  m.def("rotate", [](uintptr_t values, int64_t count, int size, uintptr_t stream) {
    check(rotate(reinterpret_cast<float*>(values), count, size, reinterpret_cast<Stream>(stream)));
  });
  m.def("append", [](const Pool& pool, int layer, const Rows& rows, uintptr_t stream) {
    check(append(pool, layer, rows, reinterpret_cast<Stream>(stream)));
  });
  m.def("copy_pages", [](const Pool& pool, uintptr_t from, uintptr_t to, int count, uintptr_t stream) {
    check(copy_pages(pool, reinterpret_cast<const int*>(from), reinterpret_cast<const int*>(to), count,
                     reinterpret_cast<Stream>(stream)));
  });
  m.def("attend", [](const Pool& pool, int layer, const Query& query, const Work& work, uintptr_t stream) {
    check(attend(pool, layer, query, work, reinterpret_cast<Stream>(stream)));
  });
  m.def("set_device", [](int device) { check(set_device(device)); });
  m.def("device_count", [] {
    int count = 0;
    const int error = device_count(&count);
    return nb::make_tuple(error, error ? 0 : count);
  });
  m.def("error_name", [](int error) { return std::string(error_name(error)); });
}
