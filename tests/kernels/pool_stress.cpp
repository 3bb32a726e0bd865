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

void run(Pool& pool, int phases, int items) {
  std::vector<int> values[2] = {std::vector<int>(items, 0), std::vector<int>(items, 0)};
  std::vector<int> prepared(pool.threads(), -1);  // the last phase that each thread prepared
  const auto region = std::make_shared<Region>(pool.threads(), phases);
  const auto work = std::make_shared<const Work>(
      Work{items,
           [&values, &prepared, items, &pool](int p, int item, int thread) {
             const std::vector<int>& before = values[p % 2];
             check(thread >= 0 && thread < pool.threads(), "thread");
             check(prepared[thread] == p, "prepared");
             check(before[item] == p && before[(item + 1) % items] == p, "all items before");
             values[(p + 1) % 2][item] += p ? 2 : 1;  // 1, 3, 5 ... and 2, 4, 6 ...
           },
           [&values, &prepared, items](int p, int thread) {
             check(prepared[thread] < p, "prepared once");
             check(values[p % 2][thread % items] == p, "prepared after all items before");
             prepared[thread] = p;
           },
           [items, phases](int p, int item) {
             check(p > 0 && p < phases && item >= 0 && item < items, "fetched");
           }});
  for (int p = 0; p < phases; ++p) region->add(work, p);
  if (items % 2) {
    pool.wake();
    pool.start(region);
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
    for (int i = 0; i < 200; ++i) run(pool, 1 + i % 13, 1 + i % 7);
    for (int i = 0; i < 5; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // long enough to fall asleep
      run(pool, 40, 5);
    }
  }
  std::puts("sound");
}
