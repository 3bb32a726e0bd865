#include "batch_check.h"

#include <algorithm>

namespace headwater {
namespace {

bool all_within(const int32_t* values, int count, int end) {
  return std::all_of(values, values + count, [end](int32_t v) { return v >= 0 && v < end; });
}

// The tokens [begin, end) are those of one sequence, whose pages are `pages`.
bool is_valid_sequence(const Batch& batch, int begin, int end, int32_t length,
                       const int32_t* pages, const KVPool& kv) {
  const int size = kv.shape.page_size;
  if (length < end - begin || (length - 1) / size >= batch.max_pages) return false;
  if (!all_within(pages, (length - 1) / size + 1, kv.num_pages)) return false;
  for (int t = begin; t < end; ++t) {
    const int position = length - (end - t);
    if (batch.positions[t] != position) return false;
    const int32_t slot = batch.slot_mapping[t];
    if (slot != -1 && slot != pages[position / size] * size + position % size) return false;
  }
  return true;
}

}  // namespace

bool are_tokens(const int32_t* token_ids, int count, const Spec& spec) {
  return all_within(token_ids, count, spec.vocab_size);
}

bool is_valid(const Batch& batch, const Spec& spec, const KVPool& kv) {
  if (batch.num_top < 0 || batch.num_top > spec.vocab_size ||
      !are_tokens(batch.token_ids, batch.num_tokens, spec) ||
      !all_within(batch.logit_rows, batch.num_rows, batch.num_tokens))
    return false;
  const int32_t* ends = batch.cu_seqlens_q;
  if (ends[0] != 0 || ends[batch.num_seqs] != batch.num_tokens) return false;
  for (int s = 0; s < batch.num_seqs; ++s) {
    if (ends[s + 1] <= ends[s] || ends[s + 1] > batch.num_tokens) return false;
    const int32_t* pages = batch.page_table + size_t(s) * batch.max_pages;
    if (!is_valid_sequence(batch, ends[s], ends[s + 1], batch.seq_lens[s], pages, kv))
      return false;
  }
  const int32_t* starts = batch.group_starts;
  return !batch.num_groups ||
         all_within(batch.group_sequences, starts[batch.num_groups], batch.num_seqs);
}

}  // namespace headwater
