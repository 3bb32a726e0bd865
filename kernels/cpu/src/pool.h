// A thread pool that runs lists of phases.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace headwater {

// What a phase's items are, and what may be done around them. It may be done in several phases, such
// as a decoder's layers: `round` tells which.
struct Work {
  int items;
  std::function<void(int round, int item, int thread)> run;
  // Done by each thread once, before its first item; may be empty.
  std::function<void(int round, int thread)> prepare = nullptr;
  // Begins to fetch what `item` reads from memory, done by the thread whose first item it is while
  // the phase before ends; may be empty. It may run when the region is done, and its `prepare` and
  // `run` no longer.
  std::function<void(int round, int item)> fetch = nullptr;
};

// Items without an order among them. Each thread begins with a run of neighbouring ones, and then
// takes what others have left: a thread whose core is busy elsewhere does fewer.
class Phase {
 public:
  // A count in a cache line of its own.
  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };

  // `counters`: one for each thread, and one more.
  Phase(std::shared_ptr<const Work> work, int round, int threads, Counter* counters)
      : work_(std::move(work)), round_(round), threads_(threads), taken_(counters),
        done_(&counters[threads].value) {}

  // Does items until all are taken; returns how many.
  int work(int thread) const;

  // Begins to fetch what the thread's first item reads.
  void fetch(int thread) const;

  int items() const { return work_->items; }
  std::atomic<int>& done() const { return *done_; }

 private:
  // Where a thread's own items begin; they end where the next thread's begin.
  int share(int thread) const { return int(int64_t(items()) * thread / threads_); }

  std::shared_ptr<const Work> work_;
  int round_;
  int threads_;
  Counter* taken_;
  std::atomic<int>* done_;
};

// Phases run one after the other: a phase begins when all items of the one before are done.
class Region {
 public:
  // For so many threads, and that many phases at most.
  explicit Region(int threads, int phases = 1)
      : threads_(threads),
        counters_(std::make_unique<Phase::Counter[]>(size_t(threads + 1) * phases)) {
    phases_.reserve(phases);
  }

  void add(std::shared_ptr<const Work> work, int round = 0) {
    if (!work->items) return;
    Phase::Counter* counters = &counters_[phases_.size() * (threads_ + 1)];
    phases_.emplace_back(std::move(work), round, threads_, counters);
  }
  void add(Work work) { add(std::make_shared<const Work>(std::move(work))); }

  const std::vector<Phase>& phases() const { return phases_; }

 private:
  const int threads_;
  const std::unique_ptr<Phase::Counter[]> counters_;
  std::vector<Phase> phases_;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();

  int threads() const { return int(workers_.size()) + 1; }

  // Wakes the workers for a region that is about to come.
  void wake();

  // Runs the region, made for so many threads, on all of them, the caller being thread 0; returns
  // when all its items are done. Nothing waits for a worker that has not claimed an item: one that
  // wakes late finds the phases done, and holds the region, nothing else, until it has passed them.
  void run(std::shared_ptr<Region> region) {
    start(region);
    finish(*region);
  }

  // The halves of `run`: the workers begin, and go on without the caller until it joins them.
  void start(std::shared_ptr<Region> region);
  void finish(const Region& region);

 private:
  void stop();
  void work_loop(int thread);
  static void work(const Region& region, int thread);

  std::vector<std::thread> workers_;
  std::mutex mutex_;  // guards current_
  std::shared_ptr<Region> current_;
  std::atomic<unsigned> epoch_{0};
  std::atomic<bool> stopping_{false};
};

// Flushes denormals to zero while it lives; attention weights otherwise hit slow microcode.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();

 private:
  unsigned saved_;
};

}  // namespace headwater
