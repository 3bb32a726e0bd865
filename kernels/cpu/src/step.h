// One forward step of a decoder over a batch.
#pragma once

#include <memory>
#include <vector>

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

// The C ABI's batch (kernels/contract.py, ForwardBatch): its arrays lie one after another.
struct PackedBatch {
  int32_t num_tokens;
  int32_t num_seqs;
  int32_t max_pages;
  int32_t num_rows;
  int32_t num_top;
  int32_t num_groups;
  int32_t num_numbers;
  const int32_t* numbers;
};

struct Batch {
  // `numbers` are the packed ones, perhaps elsewhere.
  Batch(const PackedBatch& packed, const int32_t* numbers);

  int32_t num_tokens;
  int32_t num_seqs;
  int32_t max_pages;
  int32_t num_rows;
  int32_t num_top;
  int32_t num_groups;
  const int32_t* token_ids;        // in the order of a PackedBatch
  const int32_t* positions;
  const int32_t* slot_mapping;
  const int32_t* cu_seqlens_q;
  const int32_t* seq_lens;
  const int32_t* logit_rows;
  const int32_t* page_table;
  const int32_t* group_pages;      // [num_groups], how many pages the group's sequences share
  const int32_t* group_starts;     // [num_groups + 1], into group_sequences
  const int32_t* group_sequences;  // prefix groups: sequences whose page tables begin alike
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
