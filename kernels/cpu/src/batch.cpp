#include "batch.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace headwater {

Batch::Batch(const PackedBatch& packed, const int32_t* numbers)
    : num_tokens(packed.num_tokens), num_seqs(packed.num_seqs), max_pages(packed.max_pages),
      num_rows(packed.num_rows), num_top(packed.num_top), num_groups(packed.num_groups) {
  const int32_t* next = numbers;
  const auto take = [&next](size_t count) { return std::exchange(next, next + count); };
  token_ids = take(num_tokens);
  positions = take(num_tokens);
  slot_mapping = take(num_tokens);
  cu_seqlens_q = take(num_seqs + 1);
  seq_lens = take(num_seqs);
  logit_rows = take(num_rows);
  page_table = take(size_t(num_seqs) * max_pages);
  group_pages = take(num_groups);
  group_starts = take(num_groups + 1);
  group_sequences = next;
}

bool NarrowBatch::narrows(const Batch& batch) {
  const int32_t* rows = batch.logit_rows;
  return batch.num_rows < batch.num_tokens &&
         std::is_sorted(rows, rows + batch.num_rows, std::less_equal<>());
}

NarrowBatch::NarrowBatch(const Batch& batch) {
  const int rows = batch.num_rows;
  const auto append = [this](const std::vector<int32_t>& part) {
    numbers_.insert(numbers_.end(), part.begin(), part.end());
  };
  const auto take = [&](const int32_t* from) {
    for (int r = 0; r < rows; ++r) numbers_.push_back(from[batch.logit_rows[r]]);
  };
  std::vector<int32_t> number_of(batch.num_seqs, -1);  // a sequence's here
  std::vector<int32_t> sequences, starts{0};
  for (int s = 0, r = 0; s < batch.num_seqs; ++s) {
    while (r < rows && batch.logit_rows[r] < batch.cu_seqlens_q[s + 1]) ++r;
    if (r == starts.back()) continue;
    number_of[s] = int32_t(sequences.size());
    sequences.push_back(s);
    starts.push_back(r);
  }
  std::vector<int32_t> group_starts{0}, members;
  for (int g = 0; g < batch.num_groups; ++g) {
    for (int i = batch.group_starts[g]; i < batch.group_starts[g + 1]; ++i)
      if (const int32_t number = number_of[batch.group_sequences[i]]; number >= 0)
        members.push_back(number);
    group_starts.push_back(int32_t(members.size()));
  }
  take(batch.token_ids);
  take(batch.positions);
  numbers_.insert(numbers_.end(), rows, -1);  // slots
  append(starts);
  for (const int32_t s : sequences) numbers_.push_back(batch.seq_lens[s]);
  for (int32_t r = 0; r < rows; ++r) numbers_.push_back(r);
  for (const int32_t s : sequences) {
    const int32_t* pages = batch.page_table + size_t(s) * batch.max_pages;
    numbers_.insert(numbers_.end(), pages, pages + batch.max_pages);
  }
  numbers_.insert(numbers_.end(), batch.group_pages, batch.group_pages + batch.num_groups);
  append(group_starts);
  append(members);
  packed_ = {rows,          int32_t(sequences.size()), batch.max_pages,         rows,
             batch.num_top, batch.num_groups,          int32_t(numbers_.size()), nullptr};
}

}  // namespace headwater
