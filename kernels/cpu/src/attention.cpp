#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace headwater {
namespace {

constexpr int kMergedBlocks = 4;  // a tile's partials of so many stay in the L2 cache

int ceil_div(int n, int d) { return (n + d - 1) / d; }

}  // namespace

Attention::Attention(Backend& backend, const Model& model, const KVPool& kv, const Batch& batch,
                     int first_row)
    : plan(batch, model.spec, kv.shape.page_size),
      qkv_stride((model.spec.num_heads + 2 * model.spec.num_kv_heads) * model.spec.head_dim),
      output_stride(ceil_div(model.spec.num_heads * model.spec.head_dim, kBlock) * kBlock),
      isa_(backend.isa), model_(model), spec_(model.spec), kv_(kv), batch_(batch),
      ws_(backend.workspace), first_row_(first_row),
      group_(spec_.num_heads / spec_.num_kv_heads),
      partial_stride_(kPartialHead + spec_.head_dim) {}

void Attention::reserve() {
  const size_t tokens = first_row_ + batch_.num_tokens;
  ws_.qkv.reserve(tokens * qkv_stride);
  ws_.cosine.reserve(tokens * spec_.num_rope);
  ws_.sine.reserve(tokens * spec_.num_rope);
  ws_.partials.reserve(plan.num_partials * partial_stride_);
  const int queries = plan.tile_queries;
  for (ThreadScratch& scratch : ws_.threads) {
    scratch.turned.reserve(size_t(group_) * spec_.head_dim);
    scratch.partials.reserve(size_t(1 + kMergedBlocks) * queries * partial_stride_);
    scratch.queries.resize(queries);
    scratch.blocks.resize(queries);
    scratch.first_key.resize(queries);
    scratch.last_key.resize(queries);
  }
}

void Attention::find_angles(int row) {
  float* cosine = ws_.cosine.data() + size_t(first_row_ + row) * spec_.num_rope;
  float* sine = ws_.sine.data() + size_t(first_row_ + row) * spec_.num_rope;
  for (int i = 0; i < spec_.num_rope; ++i) {
    const double angle = batch_.positions[row] * model_.rope_inv_freq[i];
    cosine[i] = float(std::cos(angle) * spec_.rope_scale);
    sine[i] = float(std::sin(angle) * spec_.rope_scale);
  }
}

// Norm, rotation and scaling of one head's query or key; `out` may be x.
void Attention::rotate(const float* x, const std::vector<float>& norm_weight, int row, float scale,
                       float* out) {
  const int dim = spec_.head_dim, half = spec_.num_rope;
  if (!norm_weight.empty()) {
    isa_.rms_norm(x, 1, norm_weight.data(), spec_.norm_eps, dim, dim, out);
    x = out;
  }
  const float* cosine = ws_.cosine.data() + size_t(first_row_ + row) * half;
  const float* sine = ws_.sine.data() + size_t(first_row_ + row) * half;
#pragma GCC ivdep
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    out[i] = (a * cosine[i] - b * sine[i]) * scale;
    out[i + half] = (b * cosine[i] + a * sine[i]) * scale;
  }
#pragma GCC ivdep
  for (int i = 2 * half; i < dim; ++i) out[i] = x[i] * scale;
}

void Attention::turn_query(const Layer& layer, int row, const float* q, float* out) {
  rotate(q, layer.q_norm, row, 1.0f / std::sqrt(float(spec_.head_dim)), out);
}

void Attention::turn_queries(int index, int first, int end) {
  for (int row = first; row < end; ++row)
    for (int h = 0; h < spec_.num_heads; ++h)
      turn_query(model_.layers[index], row, query(row, h), query(row, h));
}

void Attention::write(int index, int first, int end) {
  const int32_t* slots = batch_.slot_mapping;
  for (int row = first; row < end;) {
    // A pair's values lie side by side.
    const bool pair = kv_.shape.paired() && row + 1 < end && slots[row] >= 0 &&
                      slots[row] % 2 == 0 && slots[row + 1] == slots[row] + 1;
    const int rows = pair ? 2 : 1;
    for (int h = 0; h < spec_.num_kv_heads; ++h) store(index, row, rows, h);
    row += rows;
  }
}

// Writes the rotated keys, and the values, of one head to their slots: those of a token, or of two
// whose slots are a pair.
void Attention::store(int index, int row, int rows, int kv_head) {
  const int slot = batch_.slot_mapping[row];
  if (slot < 0) return;
  const PageShape& shape = kv_.shape;
  float keys[2 * kMaxHeadDim];
  const int head = spec_.num_heads + kv_head;
  for (int r = 0; r < rows; ++r)
    rotate(query(row + r, head), model_.layers[index].k_norm, row + r, 1.0f,
           keys + r * shape.head_dim);
  const float* values = query(row, head + spec_.num_kv_heads);
  const int offset = slot % shape.page_size;
  uint8_t* out = kv_.page(slot / shape.page_size) + shape.layer_bytes() * index +
                 shape.head_bytes() * kv_head;
  if (shape.scaled())
    store_codes(keys, values, offset, out);
  else if (shape.paired())
    store_pairs(keys, values, rows, offset, reinterpret_cast<uint32_t*>(out));
  else
    store_half(keys, values, offset, reinterpret_cast<uint16_t*>(out));
}

// A key and a value of one head to their slot of a page, as float16.
void Attention::store_half(const float* k, const float* v, int slot, uint16_t* head) {
  const PageShape& shape = kv_.shape;
  const int dim = shape.head_dim;
  uint16_t row[kMaxHeadDim];
  isa_.to_half(k, dim, row);
  for (int d = 0; d < dim; ++d) head[shape.key_index(slot, d)] = row[d];
  isa_.to_half(v, dim, head + shape.key_bytes() / sizeof(uint16_t) + shape.value_index(slot, 0));
}

// The same as bfloat16, also for two tokens, whose keys are one after the other.
void Attention::store_pairs(const float* k, const float* v, int rows, int slot, uint32_t* head) {
  const PageShape& shape = kv_.shape;
  const int dim = shape.head_dim, lanes = shape.key_lanes();
  uint16_t row[kMaxHeadDim], next[kMaxHeadDim];
  for (int r = 0; r < rows; ++r, k += dim) {
    isa_.to_bf16(k, dim, row);
    for (int i = 0; i < dim / 2; ++i)
      head[size_t(i) * lanes + slot + r] = row[2 * i] | uint32_t(row[2 * i + 1]) << 16;
  }
  head += shape.key_bytes() / sizeof(uint32_t) + size_t(slot / 2) * dim;
  isa_.to_bf16(v, dim, row);
  if (rows == 2) {
    isa_.to_bf16(v + qkv_stride, dim, next);
    for (int d = 0; d < dim; ++d) head[d] = row[d] | uint32_t(next[d]) << 16;
  } else {
    auto* own = reinterpret_cast<uint16_t*>(head) + slot % 2;
    for (int d = 0; d < dim; ++d) own[2 * d] = row[d];
  }
}

void Attention::store_codes(const float* k, const float* v, int slot, uint8_t* head) {
  const PageShape& shape = kv_.shape;
  const int dim = shape.head_dim, lanes = shape.key_lanes();
  auto* codes = reinterpret_cast<int8_t*>(head);
  int8_t key[kMaxHeadDim];
  float* key_scale = reinterpret_cast<float*>(head + shape.key_scales()) + slot;
  float* value_scale = reinterpret_cast<float*>(head + shape.value_scales()) + slot;
  isa_.to_codes(k, dim, key, key_scale);
  for (int d = 0; d < dim; ++d) codes[size_t(d) * lanes + slot] = key[d];
  isa_.to_codes(v, dim, codes + shape.key_bytes() + size_t(slot) * dim, value_scale);
}

void Attention::attend(int index, int number, int thread) {
  ThreadScratch& scratch = ws_.threads[thread];
  const AttendItem& item = plan.items[number];
  const QueryTile& tile = plan.tiles[item.tile];
  const int window = model_.layers[index].window;
  int rows = 0;
  for (int t = tile.first; t < tile.first + tile.num_tokens; ++t) {
    const int token = plan.tokens[t], position = batch_.positions[token];
    for (int g = 0; g < group_; ++g, ++rows) {
      const int head = item.kv_head * group_ + g;
      scratch.queries[rows] = query(token, head);
      scratch.first_key[rows] = window ? std::max(0, position - window + 1) : 0;
      scratch.last_key[rows] = position;
      // Of a tile across a block border, the first tokens have no partial for the last block.
      const TokenPartials& kept = plan.partials[token];
      scratch.blocks[rows] = item.block >= 0 && item.block < kept.num_blocks
                                 ? partial(kept, head, item.block)
                                 : scratch.partials.data() + size_t(rows) * partial_stride_;
    }
  }
  if (batch_.num_tokens == 1) turn(index, item, scratch);
  const PageShape& shape = kv_.shape;
  AttendBlock work{scratch.queries.data(), scratch.first_key.data(), scratch.last_key.data(),
                   rows, item.block,
                   kv_.page(0) + shape.layer_bytes() * index + shape.head_bytes() * item.kv_head,
                   batch_.page_table + size_t(tile.seq) * batch_.max_pages,
                   shape, scratch.blocks.data()};
  if (item.block >= 0)
    isa_.attend(work);
  else
    attend_all(work, tile, scratch, item.kv_head);
}

// What `turn_queries` and `write` do for many tokens, for a single one and an item's kv head.
void Attention::turn(int index, const AttendItem& item, ThreadScratch& scratch) {
  for (int g = 0; g < group_; ++g) {
    float* out = scratch.turned.data() + size_t(g) * spec_.head_dim;
    turn_query(model_.layers[index], 0, scratch.queries[g], out);
    scratch.queries[g] = out;
  }
  if (item.block == batch_.positions[0] / kKeyBlock) store(index, 0, 1, item.kv_head);
}

// All key blocks of a tile in ascending order, some at a time.
void Attention::attend_all(AttendBlock& work, const QueryTile& tile, ThreadScratch& scratch,
                           int kv_head) {
  const ptrdiff_t row_stride = ptrdiff_t(kMergedBlocks) * partial_stride_;
  float* partials = scratch.partials.data();
  float* states = partials + work.rows * row_stride;
  const auto finish = [&](int row, const float* state) {
    isa_.finish(state, spec_.head_dim,
                output(ws_.inputs, plan.tokens[tile.first + row / group_],
                       kv_head * group_ + row % group_));
  };
  work.block = work.first_key[0] / kKeyBlock;
  if (work.block + 1 == tile.end_block) {  // there is nothing to merge
    for (int r = 0; r < work.rows; ++r)
      scratch.blocks[r] = partials + size_t(r) * partial_stride_;
    isa_.attend(work);
    for (int r = 0; r < work.rows; ++r) finish(r, scratch.blocks[r]);
    return;
  }
  for (int r = 0; r < work.rows; ++r) clear(states + size_t(r) * partial_stride_);
  for (int first = work.first_key[0] / kKeyBlock; first < tile.end_block;) {
    const int count = std::min(kMergedBlocks, tile.end_block - first);
    for (int i = 0; i < count; ++i) {
      for (int r = 0; r < work.rows; ++r)
        scratch.blocks[r] = partials + r * row_stride + i * partial_stride_;
      work.block = first + i;
      isa_.attend(work);
    }
    for (int r = 0; r < work.rows; ++r)
      isa_.merge(states + size_t(r) * partial_stride_, partials + r * row_stride, count,
                 partial_stride_, spec_.head_dim);
    first += count;
  }
  for (int r = 0; r < work.rows; ++r) finish(r, states + size_t(r) * partial_stride_);
}

void Attention::merge(int row, int thread, Inputs& out) {
  const TokenPartials& blocks = plan.partials[row];
  float* state = ws_.threads[thread].partials.data();
  for (int h = 0; blocks.first >= 0 && h < spec_.num_heads; ++h) {
    clear(state);
    isa_.merge(state, partial(blocks, h, 0), blocks.num_blocks, partial_stride_, spec_.head_dim);
    isa_.finish(state, spec_.head_dim, output(out, row, h));
  }
}

void Attention::clear(float* state) const {
  std::fill(state, state + partial_stride_, 0.0f);
  state[0] = -std::numeric_limits<float>::infinity();
}

float* Attention::partial(const TokenPartials& token, int head, int block) const {
  return ws_.partials.data() +
         (token.first + ptrdiff_t(head) * token.num_blocks + block) * partial_stride_;
}

float* Attention::output(Inputs& out, int token, int head) const {
  return out.floats.data() + size_t(token) * output_stride + size_t(head) * spec_.head_dim;
}

float* Attention::query(int token, int head) const {
  return ws_.qkv.data() + size_t(first_row_ + token) * qkv_stride + size_t(head) * spec_.head_dim;
}

}  // namespace headwater
