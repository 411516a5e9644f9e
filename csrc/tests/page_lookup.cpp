// Random pages come and go, and every one is found by parent and tokens: for the sanitizers, without Python.
#include "paged/page_lookup.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace {

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "page_lookup: %s\n", what);
  std::exit(1);
}

void run(int32_t page_size, unsigned seed) {
  constexpr int kNodes = 3000;
  std::mt19937 random(seed);
  paged::PageLookup lookup(page_size, seed * 0x9E3779B97F4A7C15u);
  std::vector<int32_t> tokens(size_t(kNodes) * page_size), parent(kNodes, -1), children(kNodes, 0);
  std::vector<bool> live(kNodes, false);
  std::map<std::pair<int32_t, std::vector<int32_t>>, int32_t> oracle;
  std::vector<int32_t> page(page_size);
  for (int step = 0; step < 20000; ++step) {
    const int32_t node = int32_t(random() % kNodes);
    int32_t* own = tokens.data() + size_t(node) * page_size;
    if (live[node]) {
      if (children[node]) continue;
      require(lookup.erase(node) && !lookup.erase(node), "a node was not there, or twice");
      oracle.erase({parent[node], std::vector<int32_t>(own, own + page_size)});
      if (parent[node] >= 0) --children[parent[node]];
      live[node] = false;
      continue;
    }
    const int32_t other = int32_t(random() % kNodes), above = live[other] ? other : -1 - int32_t(random() % 3);
    for (int32_t& token : page) token = int32_t(random() % 3);
    if (!oracle.emplace(std::make_pair(above, page), node).second) continue;
    std::copy(page.begin(), page.end(), own);
    parent[node] = above;
    if (above >= 0) ++children[above];
    live[node] = true;
    lookup.insert(node, above, own);
  }
  require(lookup.size() == oracle.size(), "another number of nodes");
  for (const auto& [key, node] : oracle) {
    int32_t found = -1;
    const int64_t n = lookup.match(key.first, key.second.data(), 1, tokens.data(), parent.data(), &found);
    require(n == 1 && found == node, "a page was not found");
    std::vector<int32_t> path, nodes;
    int32_t at = node;
    for (; at >= 0; at = parent[at]) {
      path.insert(path.begin(), tokens.begin() + size_t(at) * page_size, tokens.begin() + size_t(at + 1) * page_size);
      nodes.insert(nodes.begin(), at);
    }
    std::vector<int32_t> out(nodes.size());
    require(lookup.match(at, path.data(), int64_t(nodes.size()), tokens.data(), parent.data(), out.data()) ==
                    int64_t(nodes.size()) && out == nodes, "a chain was not found");
  }
  lookup.clear();
  require(lookup.size() == 0, "something was left");
}

}  // namespace

int check_page_lookup() {
  for (int32_t page_size : {1, 2, 3, 4, 7, 16}) run(page_size, 17u + unsigned(page_size));
  std::printf("page_lookup ok\n");
  return 0;
}
