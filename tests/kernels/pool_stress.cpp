// Regions of many phases on pools of several sizes, one after the other and while workers sleep:
// every item runs once, after all items of the phase before. Run under ThreadSanitizer.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "pool.h"

using namespace headwater;

namespace {

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

// `early`: the workers begin before the phases are added.
void run(Pool& pool, int phases, int items, bool early) {
  std::vector<int> values[2] = {std::vector<int>(items, 0), std::vector<int>(items, 0)};
  const auto region = std::make_shared<Region>();
  if (early) pool.start(region);
  for (int p = 0; p < phases; ++p)
    region->add(items, [&values, p, items, &pool](int item, int thread) {
      const std::vector<int>& before = values[p % 2];
      check(thread >= 0 && thread < pool.threads(), "thread");
      check(before[item] == p && before[(item + 1) % items] == p, "all items before");
      values[(p + 1) % 2][item] += p ? 2 : 1;  // 1, 3, 5 ... and 2, 4, 6 ...
    });
  if (early) {
    region->close();
    pool.finish(*region);
  } else {
    pool.run(region);
  }
  for (const int value : values[phases % 2]) check(value == phases, "every item once");
}

}  // namespace

int main() {
  for (const int threads : {1, 2, 3, 8}) {
    Pool pool(threads);
    for (int i = 0; i < 200; ++i) run(pool, 1 + i % 13, 1 + i % 7, i % 3 == 0);
    for (int i = 0; i < 5; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // long enough to fall asleep
      run(pool, 40, 5, i % 2 == 0);
    }
  }
  std::puts("sound");
}
