// One forward step of a decoder over a batch.
#pragma once

#include <memory>
#include <vector>

#include "batch.h"
#include "isa.h"
#include "memory.h"
#include "memory_ahead.h"
#include "model.h"
#include "pool.h"

namespace headwater {

struct KVPool {
  KVPool(const PageShape& page_shape, int pages)
      : shape(page_shape), num_pages(pages), memory(page_shape.page_bytes() * pages, true),
        ahead(memory.data(), memory.bytes()) {}

  const PageShape shape;
  const int num_pages;
  const Mapping memory;
  MemoryAhead ahead;

  uint8_t* page(int id) const { return memory.data() + shape.page_bytes() * id; }
};

struct Result {
  float* full;  // [num_rows, vocab] where num_top is 0, else null
  int32_t* top_ids;
  float* top_logits;
  float* logsumexp;
};

// A product's input, [rows, cols], in the forms that are wanted.
struct Inputs {
  Buffer<float> floats;
  Buffer<Act8> int8;
  Buffer<Act16> int16;

  void reserve(size_t rows, int cols) {
    floats.reserve(rows * cols);
    int8.reserve(rows * cols / kBlock);
    int16.reserve(rows * cols / kBlock);
  }
};

// What one thread needs for an item.
struct ThreadScratch {
  Inputs inputs;         // of a single row
  Buffer<float> turned;  // a single token's queries of one kv head
  Buffer<float> output;  // of a linear item
  Buffer<float> weights;  // an unpacked tile
  Buffer<float> partials;
  Buffer<Candidate> best;
  std::vector<const float*> queries;
  std::vector<float*> blocks;  // where partials go
  std::vector<int> first_key, last_key;
};

// Memory of steps, kept between them.
struct Workspace {
  Buffer<float> x, qkv, cosine, sine, partials, logits;
  Inputs inputs, inner;  // of the products with hidden_size columns or heads, and of `down`
  std::vector<ThreadScratch> threads;
};

class Step;

struct Backend {
  Backend(const Isa& table, int num_threads, bool exact_mode)
      : isa(table), pool(num_threads), exact(exact_mode) {
    workspace.threads = std::vector<ThreadScratch>(num_threads);
  }

  const Isa& isa;
  Pool pool;
  const bool exact;
  Workspace workspace;
  std::shared_ptr<Step> last;  // begun
  std::shared_ptr<Step> next;  // prepared
  bool running = false;        // `last` has not been finished
};

// Makes `backend.next`, also while a step runs; false where the batch is outside the contract. What
// `result` points to is used until `finish_step`.
bool prepare_step(Backend& backend, const Model& model, KVPool& kv, const PackedBatch& batch,
                  const Result& result);

// Begins `backend.next`, with these tokens in place of its own, on the pool's workers; false where
// one is outside the vocabulary. Throws std::bad_alloc before anything is written.
bool start_step(Backend& backend, const int32_t* token_ids);

// Computes with the workers until the step is done.
void finish_step(Backend& backend);

}  // namespace headwater
