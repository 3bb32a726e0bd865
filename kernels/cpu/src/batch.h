// The tokens of a step, and those of them whose logits are wanted.
#pragma once

#include <cstdint>
#include <vector>

namespace headwater {

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

// Of the last layer only keys and values of all tokens are needed, everything else of those whose
// logits are wanted alone: a batch of these, whose keys are in their slots already (slot -1). Only
// the sequences with such tokens are left, in the same order.
class NarrowBatch {
 public:
  explicit NarrowBatch(const Batch& batch);

  // Whether there are tokens to leave out, and the others are in the batch's order.
  static bool narrows(const Batch& batch);

  Batch batch() const { return Batch(packed_, numbers_.data()); }  // its arrays are this object's

 private:
  std::vector<int32_t> numbers_;
  PackedBatch packed_;
};

}  // namespace headwater
