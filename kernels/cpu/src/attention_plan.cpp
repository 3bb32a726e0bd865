#include "attention_plan.h"

#include <algorithm>

namespace headwater {
namespace {

constexpr int kTileQueries = 48;

}  // namespace

AttentionPlan::AttentionPlan(const Batch& batch, const Spec& spec, int page_size)
    : partials(batch.num_tokens), batch_(batch), spec_(spec), page_size_(page_size) {
  const int group = spec.num_heads / spec.num_kv_heads;
  tile_tokens_ = std::max(1, kTileQueries / group);
  tile_queries = tile_tokens_ * group;
  for (int s = 0; s < batch.num_seqs; ++s)
    for (int t = batch.cu_seqlens_q[s]; split(s) && t < batch.cu_seqlens_q[s + 1]; ++t) {
      partials[t] = {num_partials, batch.positions[t] / kKeyBlock + 1};
      num_partials += ptrdiff_t(spec.num_heads) * partials[t].num_blocks;
    }
  std::vector<int> first_block(batch.num_seqs, 0);
  for (int g = 0; g < batch.num_groups; ++g) {
    std::vector<int> members;
    for (int i = batch.group_starts[g]; i < batch.group_starts[g + 1]; ++i)
      if (split(batch.group_sequences[i])) members.push_back(batch.group_sequences[i]);
    const int blocks = shared_blocks(members.data(), int(members.size()), batch.group_pages[g]);
    if (blocks) add_group(members, blocks);
    for (const int s : members) first_block[s] = blocks;
  }
  for (int s = 0; s < batch.num_seqs; ++s) add_sequence(s, first_block[s]);
}

// Key blocks that lie wholly in the pages which the members begin with, and before their new
// tokens. The hint is checked: a wrong one costs nothing but speed.
int AttentionPlan::shared_blocks(const int32_t* members, int count, int pages) const {
  if (count < 2) return 0;
  const int32_t* shown = batch_.page_table + size_t(members[0]) * batch_.max_pages;
  for (int i = 0; i < count; ++i) {
    pages = std::min(pages, batch_.positions[batch_.cu_seqlens_q[members[i]]] / page_size_);
    const int32_t* own = batch_.page_table + size_t(members[i]) * batch_.max_pages;
    pages = int(std::mismatch(shown, shown + pages, own).first - shown);
  }
  return pages * page_size_ / kKeyBlock;
}

void AttentionPlan::add_group(const std::vector<int>& members, int blocks) {
  const int begin = int(tokens.size());
  for (const int s : members)
    for (int t = batch_.cu_seqlens_q[s]; t < batch_.cu_seqlens_q[s + 1]; ++t) tokens.push_back(t);
  const int end = int(tokens.size());
  for (int first = begin; first < end; first += tile_tokens_) {
    tiles.push_back({members[0], first, std::min(tile_tokens_, end - first), blocks});
    add_items(int(tiles.size()) - 1, 0, blocks);
  }
}

void AttentionPlan::add_sequence(int seq, int first_block) {
  const int begin = batch_.cu_seqlens_q[seq], end = batch_.cu_seqlens_q[seq + 1];
  // The last tokens see the most keys: begun first, they do not end last.
  for (int last = end; last > begin;) {
    const int count = std::min(tile_tokens_, last - begin);
    const int blocks = batch_.positions[last - 1] / kKeyBlock + 1;
    tiles.push_back({seq, int(tokens.size()), count, blocks});
    for (int t = last - count; t < last; ++t) tokens.push_back(t);
    if (split(seq))
      add_items(int(tiles.size()) - 1, first_block, blocks);
    else
      add_items(int(tiles.size()) - 1, -1, 0);
    last -= count;
  }
}

void AttentionPlan::add_items(int tile, int first_block, int end_block) {
  for (int h = 0; h < spec_.num_kv_heads; ++h)
    for (int b = first_block; b < end_block; ++b) items.push_back({tile, h, b});
}

}  // namespace headwater
