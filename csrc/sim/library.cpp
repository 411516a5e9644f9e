// The launchers of csrc/cuda/api.h over the simulation, with C names: what the tests load through ctypes.
#include <exception>
#include <string>

#include "../cuda/api.h"
#include "simt.h"

namespace {

thread_local std::string message;

template <class F>
int guard(F call) {
  try {
    return call();
  } catch (const std::exception& e) {
    message = e.what();
    return -1;
  }
}

}  // namespace

using namespace paged::cuda;

extern "C" {

// order: 0 forward, 1 reverse, 2 random; copies: 0 late, 1 early.
void paged_sim_configure(int order, int copies, int workers, unsigned seed) {
  sim::config() = {static_cast<sim::Order>(order), static_cast<sim::Copies>(copies), workers, seed};
}

const char* paged_sim_message() { return message.c_str(); }  // of the last call that returned -1

int paged_sim_rotate(float* values, int64_t count, int size) {
  return guard([&] { return rotate(values, count, size, nullptr); });
}

int paged_sim_append(const Pool* pool, int layer, const Rows* rows) {
  return guard([&] { return append(*pool, layer, *rows, nullptr); });
}

int paged_sim_copy_pages(const Pool* pool, const int* from, const int* to, int count) {
  return guard([&] { return copy_pages(*pool, from, to, count, nullptr); });
}

int paged_sim_attend(const Pool* pool, int layer, const Query* query, const Work* work) {
  return guard([&] { return attend(*pool, layer, *query, *work, nullptr); });
}

}  // extern "C"
