#include "pool.h"

#include <immintrin.h>

namespace headwater {
namespace {

constexpr int kSpins = 2000;  // some 50 microseconds, then sleep in the kernel

// Waits until `value` is not `old`: a bounded spin, then a futex.
template <class T>
void await_change(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

int Phase::work(int thread) const {
  int finished = 0;
  for (int i = 0; i < threads_; ++i) {
    const int owner = (thread + i) % threads_, first = share(owner);
    const int count = share(owner + 1) - first;
    std::atomic<int>& taken = taken_[owner].value;
    while (taken.load(std::memory_order_relaxed) < count) {
      const int item = taken.fetch_add(1, std::memory_order_relaxed);
      if (item >= count) break;
      if (!finished++ && work_->prepare) work_->prepare(round_, thread);
      work_->run(round_, first + item, thread);
    }
  }
  return finished;
}

void Phase::fetch(int thread) const {
  if (!work_->fetch) return;
  const int item = share(thread) + taken_[thread].value.load(std::memory_order_relaxed);
  if (item < share(thread + 1)) work_->fetch(round_, item);
}

FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }

Pool::Pool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work_loop(i); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_ = true;
  wake();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::wake() {
  ++epoch_;
  epoch_.notify_all();
}

void Pool::start(std::shared_ptr<Region> region) {
  {
    const std::lock_guard lock(mutex_);
    current_ = std::move(region);
  }
  wake();
}

void Pool::finish(const Region& region) {
  const FlushDenormals flush;
  work(region, 0);
  const std::lock_guard lock(mutex_);
  current_.reset();
}

void Pool::work_loop(int thread) {
  const FlushDenormals flush;
  unsigned seen = 0;
  while (true) {
    await_change(epoch_, seen);
    seen = epoch_.load(std::memory_order_acquire);
    if (stopping_) return;
    std::shared_ptr<Region> region;
    {
      const std::lock_guard lock(mutex_);
      region = current_;
    }
    if (region) work(*region, thread);
  }
}

void Pool::work(const Region& region, int thread) {
  const std::vector<Phase>& phases = region.phases();
  for (auto phase = phases.begin(); phase != phases.end();) {
    const int items = phase->items(), finished = phase->work(thread);
    std::atomic<int>& all_done = phase->done();
    if (finished && all_done.fetch_add(finished) + finished == items) all_done.notify_all();
    if (++phase != phases.end()) phase->fetch(thread);
    for (int done; (done = all_done.load(std::memory_order_acquire)) != items;)
      await_change(all_done, done);
  }
}

}  // namespace headwater
