#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "attention_plan.h"
#include "fetch_plan.h"

namespace headwater {
namespace {

constexpr int kChunkRows = 128;  // rows of one linear item: their activations stay in the L2 cache
constexpr int kOutputFloats = 8192;
constexpr int kMergedBlocks = 4;  // a tile's partials of so many stay in the L2 cache

int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
int ceil_div(int n, int d) { return (n + d - 1) / d; }

// out[row] (+)= w x[row] + bias, out having `stride` floats a row.
struct Product {
  const Matrix* w;
  const float* bias;  // null: none
  float* out;
  ptrdiff_t stride;
  bool add;
};

}  // namespace

class Step {
 public:
  Step(Backend& backend, const Model& model, const KVPool& kv, const Batch& batch,
       const Result& result)
      : backend_(backend), isa_(backend.isa), model_(model), spec_(model.spec), kv_(kv),
        batch_(batch), result_(result), ws_(backend.workspace),
        plan_(batch_, spec_, kv.shape.page_size), fetches_(plan_, batch_, kv, kv.shape.page_size),
        group_(spec_.num_heads / spec_.num_kv_heads),
        partial_stride_(kPartialHead + spec_.head_dim) {}

  void start() {
    reserve();
    backend_.pool.start(region_);
    try {
      add_phases();
    } catch (...) {
      region_->close();
      finish();
      throw;
    }
    region_->close();
  }

  void finish() { backend_.pool.finish(*region_); }

 private:
  void reserve() {
    const size_t rows = std::max(batch_.num_tokens, batch_.num_rows);
    const int attention_cols = spec_.num_heads * spec_.head_dim;
    hidden_stride_ = round_up(spec_.hidden_size, kBlock);
    inner_stride_ = round_up(spec_.intermediate_size, kBlock);
    attention_stride_ = round_up(attention_cols, kBlock);
    qkv_stride_ = attention_cols + 2 * spec_.num_kv_heads * spec_.head_dim;
    const int widest = std::max({hidden_stride_, inner_stride_, attention_stride_});
    ws_.x.reserve(rows * hidden_stride_);
    ws_.normed.reserve(rows * hidden_stride_);
    ws_.qkv.reserve(rows * qkv_stride_);
    ws_.attention.reserve(rows * attention_stride_);
    ws_.hidden.reserve(rows * inner_stride_);
    ws_.cosine.reserve(rows * spec_.num_rope);
    ws_.sine.reserve(rows * spec_.num_rope);
    const int input = std::max(hidden_stride_, attention_stride_);
    ws_.input.int8.reserve(rows * input / kBlock);
    ws_.input.int16.reserve(rows * input / kBlock);
    ws_.inner.int8.reserve(rows * inner_stride_ / kBlock);
    ws_.inner.int16.reserve(rows * inner_stride_ / kBlock);
    if (batch_.num_top) ws_.logits.reserve(size_t(batch_.num_rows) * spec_.vocab_size);
    ws_.partials.reserve(plan_.num_partials * partial_stride_);
    const int queries = plan_.tile_queries;
    for (ThreadScratch& scratch : ws_.threads) {
      scratch.output.reserve(kOutputFloats);
      scratch.weights.reserve(size_t(widest) * kTileRows);
      scratch.partials.reserve(size_t(1 + kMergedBlocks) * queries * partial_stride_);
      scratch.best.reserve(batch_.num_top);
      scratch.queries.resize(queries);
      scratch.blocks.resize(queries);
      scratch.first_key.resize(queries);
      scratch.last_key.resize(queries);
    }
  }

  ActKind kind(const Matrix& w) const {
    if (backend_.exact || !w.quantised()) return kActF32;
    return w.four_bit() ? kActInt8 : kActInt16;
  }

  static Acts acts(const Buffer<float>& floats, ptrdiff_t stride, const Quants& quants) {
    return {floats.data(), stride, quants.int8.data(), quants.int16.data()};
  }

  void add_phases() {
    add_rows(batch_.num_tokens, [this](int row, int) { embed(row); });
    for (int i = 0; i < spec_.num_layers; ++i) add_layer(i);
    add_logits();
  }

  // --- phases ---------------------------------------------------------------------------------

  template <class F>
  void add_rows(int rows, F run_row) {
    const int per_item = std::max(1, rows / (backend_.pool.threads() * 4));
    region_->add(ceil_div(rows, per_item), [=](int item, int thread) {
      for (int r = item * per_item; r < std::min(rows, (item + 1) * per_item); ++r)
        run_row(r, thread);
    });
  }

  // Weight tiles of one item: enough items for all threads, outputs that fit the scratch, and pairs
  // of tiles where there are many rows.
  int tiles_per_item(int tiles, int rows) const {
    const int most = 2 * std::max(1, 16 / ceil_div(rows, 4));
    const int count = std::clamp(tiles / (backend_.pool.threads() * 8), 1, most);
    return rows > 2 ? round_up(count, 2) : count;
  }

  void add_linear(const Acts& x, int rows, std::vector<Product> products, FetchPart part = {}) {
    int tiles = 0;
    for (const Product& p : products) tiles += p.w->tiles();
    const int per_item = tiles_per_item(tiles, rows);
    int items = 0;
    for (const Product& p : products) items += ceil_div(p.w->tiles(), per_item);
    const int all_items = items * ceil_div(rows, kChunkRows);
    region_->add(all_items,
                 [=, this, products = std::move(products)](int item, int thread) {
                   const int first_row = item / items * kChunkRows;
                   const int num_rows = std::min(kChunkRows, rows - first_row);
                   int index = item % items;
                   const Product* p = products.data();
                   for (int n; index >= (n = ceil_div(p->w->tiles(), per_item)); ++p) index -= n;
                   const int tile = index * per_item;
                   const int tiles = std::min(per_item, p->w->tiles() - tile);
                   Ahead ahead =
                       fetches_.share(part, item, all_items, chances(*p->w, num_rows, tiles));
                   product(*p, x, first_row, num_rows, tile, tiles, thread, ahead);
                 });
  }

  // How often a product of that size could fetch something, at least.
  static int chances(const Matrix& w, int rows, int tiles) {
    return ceil_div(tiles, 2) * w.units() * ceil_div(rows, 6);
  }

  // The part of the pages of `layer` that is fetched by a product which begins after `before`
  // weights of those since the last attention, and has `own` of them.
  FetchPart part(int layer, double before, double own) const {
    if (layer == spec_.num_layers || model_.layers[layer].window) return {};
    double all = qkv_weights(layer);
    if (layer) all += o_weights(layer - 1) + mlp_weights(layer - 1);
    return {layer, before / all, (before + own) / all};
  }
  static double weights(const Matrix& w) { return double(w.rows) * w.cols; }
  double qkv_weights(int layer) const {
    const Layer& l = model_.layers[layer];
    return weights(l.q) + weights(l.k) + weights(l.v);
  }
  double o_weights(int layer) const { return weights(model_.layers[layer].o); }
  double mlp_weights(int layer) const { return 3 * weights(model_.layers[layer].down); }

  void add_layer(int index) {
    const Layer& layer = model_.layers[index];
    const int tokens = batch_.num_tokens;
    const int heads = spec_.num_heads * spec_.head_dim, kv = spec_.num_kv_heads * spec_.head_dim;
    float* qkv = ws_.qkv.data();
    const auto bias = [](const std::vector<float>& b) { return b.empty() ? nullptr : b.data(); };

    const int qkv_kinds = kind(layer.q) | kind(layer.k) | kind(layer.v);
    add_rows(tokens, [this, &layer, qkv_kinds](int row, int) {
      norm(row, row, layer.attn_norm, qkv_kinds);
    });
    add_linear(acts(ws_.normed, hidden_stride_, ws_.input), tokens,
               {{&layer.q, bias(layer.q_bias), qkv, qkv_stride_, false},
                {&layer.k, bias(layer.k_bias), qkv + heads, qkv_stride_, false},
                {&layer.v, bias(layer.v_bias), qkv + heads + kv, qkv_stride_, false}},
               part(index, index ? o_weights(index - 1) + mlp_weights(index - 1) : 0,
                    qkv_weights(index)));
    add_rows(tokens, [this, index](int row, int) { position(index, row); });
    region_->add(int(plan_.items.size()),
                 [this, index](int item, int thread) { attend(index, plan_.items[item], thread); });
    add_rows(tokens, [this, &layer](int row, int thread) { gather(row, kind(layer.o), thread); });
    add_linear(acts(ws_.attention, attention_stride_, ws_.input), tokens,
               {{&layer.o, bias(layer.o_bias), ws_.x.data(), hidden_stride_, true}},
               part(index + 1, 0, o_weights(index)));

    const int mlp_kinds = kind(layer.gate) | kind(layer.up);
    add_rows(tokens, [this, &layer, mlp_kinds](int row, int) {
      norm(row, row, layer.mlp_norm, mlp_kinds);
    });
    const double o = o_weights(index), mlp = mlp_weights(index);
    add_gated(layer, part(index + 1, o, mlp * 2 / 3));
    add_linear(acts(ws_.hidden, inner_stride_, ws_.inner), tokens,
               {{&layer.down, nullptr, ws_.x.data(), hidden_stride_, true}},
               part(index + 1, o + mlp * 2 / 3, mlp / 3));
  }

  // hidden = silu(gate x) * (up x), in the form that `down` wants. An item has whole blocks of it.
  void add_gated(const Layer& layer, FetchPart part) {
    const int rows = batch_.num_tokens, tiles = layer.gate.tiles();
    const int per_item = round_up(tiles_per_item(tiles, rows), kBlock / kTileRows);
    const int items = ceil_div(tiles, per_item);
    const int all_items = items * ceil_div(rows, kChunkRows);
    region_->add(all_items, [=, this, &layer](int item, int thread) {
      const int first_row = item / items * kChunkRows;
      const int num_rows = std::min(kChunkRows, rows - first_row);
      const int tile = item % items * per_item, count = std::min(per_item, tiles - tile);
      Ahead ahead =
          fetches_.share(part, item, all_items, 2 * chances(layer.gate, num_rows, count));
      gated(layer, first_row, num_rows, tile, count, thread, ahead);
    });
  }

  void add_logits() {
    const int rows = batch_.num_rows;
    add_rows(rows, [this](int row, int) {
      norm(batch_.logit_rows[row], row, model_.final_norm, kind(model_.head));
    });
    float* logits = batch_.num_top ? ws_.logits.data() : result_.full;
    if (rows)
      add_linear(acts(ws_.normed, hidden_stride_, ws_.input), rows,
                 {{&model_.head, nullptr, logits, spec_.vocab_size, false}});
    if (batch_.num_top) add_rows(rows, [this](int row, int thread) { select(row, thread); });
  }

  // --- items ----------------------------------------------------------------------------------

  void embed(int row) {
    float* x = ws_.x.data() + size_t(row) * hidden_stride_;
    isa_.unpack_row(model_.embedding, batch_.token_ids[row], x);
    std::fill(x + spec_.hidden_size, x + hidden_stride_, 0.0f);
    const size_t attention_cols = size_t(spec_.num_heads) * spec_.head_dim;
    float* attention = ws_.attention.data() + size_t(row) * attention_stride_;
    std::fill(attention + attention_cols, attention + attention_stride_, 0.0f);
    float* hidden = ws_.hidden.data() + size_t(row) * inner_stride_;
    std::fill(hidden + spec_.intermediate_size, hidden + inner_stride_, 0.0f);
    for (int i = 0; i < spec_.num_rope; ++i) {
      const double angle = batch_.positions[row] * model_.rope_inv_freq[i];
      ws_.cosine.data()[size_t(row) * spec_.num_rope + i] =
          float(std::cos(angle) * spec_.rope_scale);
      ws_.sine.data()[size_t(row) * spec_.num_rope + i] = float(std::sin(angle) * spec_.rope_scale);
    }
  }

  // `cols` activations to the blocks from `block` on.
  void quantise(const float* x, int cols, int kinds, Quants& out, size_t block) {
    if (kinds & kActInt8) isa_.quantise8(x, cols, out.int8.data() + block);
    if (kinds & kActInt16) isa_.quantise16(x, cols, out.int16.data() + block);
  }

  void norm(int from, int to, const std::vector<float>& weight, int kinds) {
    float* y = ws_.normed.data() + size_t(to) * hidden_stride_;
    isa_.rms_norm(ws_.x.data() + size_t(from) * hidden_stride_, weight.data(), spec_.norm_eps,
                  hidden_stride_, spec_.hidden_size, y);
    quantise(y, hidden_stride_, kinds, ws_.input, size_t(to) * (hidden_stride_ / kBlock));
  }

  void product(const Product& p, const Acts& x, int first_row, int num_rows, int first_tile,
               int num_tiles, int thread, Ahead& ahead) {
    ThreadScratch& scratch = ws_.threads[thread];
    const int column = first_tile * kTileRows, width = num_tiles * kTileRows;
    const int cols = std::min(width, p.w->rows - column);
    float* out = p.out + first_row * p.stride + column;
    if (!p.bias && cols == width) {
      isa_.linear(*p.w, kind(*p.w), x, first_row, num_rows, first_tile, num_tiles, out, p.stride,
                  p.add, scratch.weights.data(), ahead);
      return;
    }
    float* y = scratch.output.data();
    isa_.linear(*p.w, kind(*p.w), x, first_row, num_rows, first_tile, num_tiles, y, width, false,
                scratch.weights.data(), ahead);
    for (int r = 0; r < num_rows; ++r, y += width, out += p.stride) {
      if (p.bias)
        for (int c = 0; c < cols; ++c) y[c] += p.bias[column + c];
      for (int c = 0; c < cols; ++c) out[c] = p.add ? out[c] + y[c] : y[c];
    }
  }

  void gated(const Layer& layer, int first_row, int num_rows, int first_tile, int num_tiles,
             int thread, Ahead& ahead) {
    ThreadScratch& scratch = ws_.threads[thread];
    const Acts x = acts(ws_.normed, hidden_stride_, ws_.input);
    const int width = num_tiles * kTileRows;
    float* gate = scratch.output.data();
    float* up = gate + num_rows * width;
    isa_.linear(layer.gate, kind(layer.gate), x, first_row, num_rows, first_tile, num_tiles, gate,
                width, false, scratch.weights.data(), ahead);
    isa_.linear(layer.up, kind(layer.up), x, first_row, num_rows, first_tile, num_tiles, up, width,
                false, scratch.weights.data(), ahead);
    const int column = first_tile * kTileRows, kinds = kind(layer.down);
    const int cols = std::min(width, spec_.intermediate_size - column);
    for (int r = first_row; r < first_row + num_rows; ++r, gate += width, up += width) {
      isa_.silu_mul(gate, up, width, gate);
      const size_t place = size_t(r) * inner_stride_ + column;
      if (kinds & kActF32) std::copy(gate, gate + cols, ws_.hidden.data() + place);
      quantise(gate, cols, kinds, ws_.inner, place / kBlock);
    }
  }

  // Norm and rotation of one head's query or key.
  void rotate(float* x, const std::vector<float>& norm_weight, int row) {
    if (!norm_weight.empty())
      isa_.rms_norm(x, norm_weight.data(), spec_.norm_eps, spec_.head_dim, spec_.head_dim, x);
    const int half = spec_.num_rope;
    const float* cosine = ws_.cosine.data() + size_t(row) * half;
    const float* sine = ws_.sine.data() + size_t(row) * half;
    for (int i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cosine[i] - b * sine[i];
      x[i + half] = b * cosine[i] + a * sine[i];
    }
  }

  // Rotates a token's queries and key, and writes its key and value to their slot.
  void position(int index, int row) {
    const Layer& layer = model_.layers[index];
    const PageShape& shape = kv_.shape;
    const int dim = spec_.head_dim;
    const float scale = 1.0f / std::sqrt(float(dim));
    float* q = ws_.qkv.data() + size_t(row) * qkv_stride_;
    for (int h = 0; h < spec_.num_heads; ++h, q += dim) {
      rotate(q, layer.q_norm, row);
      for (int d = 0; d < dim; ++d) q[d] *= scale;
    }
    const int slot = batch_.slot_mapping[row];
    if (slot < 0) return;
    float* k = q;
    const float* v = k + spec_.num_kv_heads * dim;
    const int offset = slot % shape.page_size;
    uint8_t* out = kv_.page(slot / shape.page_size) + shape.layer_bytes() * index;
    for (int h = 0; h < spec_.num_kv_heads; ++h, k += dim, v += dim, out += shape.head_bytes()) {
      rotate(k, layer.k_norm, row);
      if (shape.scaled())
        store_codes(k, v, offset, out);
      else
        store_short(k, v, offset, reinterpret_cast<uint16_t*>(out));
    }
  }

  // A key and a value of one head to their slot of a page, as float16 or bfloat16.
  void store_short(const float* k, const float* v, int slot, uint16_t* head) {
    const PageShape& shape = kv_.shape;
    const int dim = shape.head_dim;
    const auto convert = shape.paired() ? isa_.to_bf16 : isa_.to_half;
    uint16_t row[kMaxHeadDim];
    convert(k, dim, row);
    for (int d = 0; d < dim; ++d) head[shape.key_index(slot, d)] = row[d];
    convert(v, dim, row);
    head += shape.key_bytes() / sizeof(uint16_t);
    for (int d = 0; d < dim; ++d) head[shape.value_index(slot, d)] = row[d];
  }

  void store_codes(const float* k, const float* v, int slot, uint8_t* head) {
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

  void attend(int index, const AttendItem& item, int thread) {
    ThreadScratch& scratch = ws_.threads[thread];
    const QueryTile& tile = plan_.tiles[item.tile];
    const int window = model_.layers[index].window;
    int rows = 0;
    for (int t = tile.first; t < tile.first + tile.num_tokens; ++t) {
      const int token = plan_.tokens[t], position = batch_.positions[token];
      for (int g = 0; g < group_; ++g, ++rows) {
        const int head = item.kv_head * group_ + g;
        scratch.queries[rows] =
            ws_.qkv.data() + size_t(token) * qkv_stride_ + size_t(head) * spec_.head_dim;
        scratch.first_key[rows] = window ? std::max(0, position - window + 1) : 0;
        scratch.last_key[rows] = position;
        // Of a tile across a block border, the first tokens have no partial for the last block.
        const TokenPartials& kept = plan_.partials[token];
        scratch.blocks[rows] = item.block >= 0 && item.block < kept.num_blocks
                                   ? partial(kept, head, item.block)
                                   : scratch.partials.data() + size_t(rows) * partial_stride_;
      }
    }
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

  // All key blocks of a tile in ascending order, some at a time.
  void attend_all(AttendBlock& work, const QueryTile& tile, ThreadScratch& scratch, int kv_head) {
    const ptrdiff_t row_stride = ptrdiff_t(kMergedBlocks) * partial_stride_;
    float* partials = scratch.partials.data();
    float* states = partials + work.rows * row_stride;
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
    for (int r = 0; r < work.rows; ++r)
      isa_.finish(states + size_t(r) * partial_stride_, spec_.head_dim,
                  head_output(plan_.tokens[tile.first + r / group_],
                              kv_head * group_ + r % group_));
  }

  // Merges a token's key blocks where they were computed apart, and quantises its attention output.
  void gather(int row, int kinds, int thread) {
    const TokenPartials& blocks = plan_.partials[row];
    float* state = ws_.threads[thread].partials.data();
    for (int h = 0; blocks.first >= 0 && h < spec_.num_heads; ++h) {
      clear(state);
      isa_.merge(state, partial(blocks, h, 0), blocks.num_blocks, partial_stride_, spec_.head_dim);
      isa_.finish(state, spec_.head_dim, head_output(row, h));
    }
    quantise(ws_.attention.data() + size_t(row) * attention_stride_, attention_stride_, kinds,
             ws_.input, size_t(row) * (attention_stride_ / kBlock));
  }

  void select(int row, int thread) {
    const float* logits = ws_.logits.data() + size_t(row) * spec_.vocab_size;
    Candidate* best = ws_.threads[thread].best.data();
    isa_.select(logits, spec_.vocab_size, batch_.num_top, best);
    for (int i = 0; i < batch_.num_top; ++i) {
      result_.top_ids[size_t(row) * batch_.num_top + i] = best[i].id;
      result_.top_logits[size_t(row) * batch_.num_top + i] = best[i].logit;
    }
    result_.logsumexp[row] = isa_.log_sum_exp(logits, spec_.vocab_size);
  }

  void clear(float* state) const {
    std::fill(state, state + partial_stride_, 0.0f);
    state[0] = -std::numeric_limits<float>::infinity();
  }
  float* partial(const TokenPartials& token, int head, int block) const {
    return ws_.partials.data() +
           (token.first + ptrdiff_t(head) * token.num_blocks + block) * partial_stride_;
  }
  float* head_output(int token, int head) const {
    return ws_.attention.data() + size_t(token) * attention_stride_ +
           size_t(head) * spec_.head_dim;
  }

  Backend& backend_;
  const Isa& isa_;
  const Model& model_;
  const Spec& spec_;
  const KVPool& kv_;
  const Batch batch_;
  const Result result_;
  Workspace& ws_;
  const AttentionPlan plan_;
  const FetchPlan fetches_;
  const int group_;
  const int partial_stride_;
  int hidden_stride_ = 0, inner_stride_ = 0, attention_stride_ = 0, qkv_stride_ = 0;
  std::shared_ptr<Region> region_ = std::make_shared<Region>();
};

Batch::Batch(const PackedBatch& packed)
    : num_tokens(packed.num_tokens), num_seqs(packed.num_seqs), max_pages(packed.max_pages),
      num_rows(packed.num_rows), num_top(packed.num_top), num_groups(packed.num_groups) {
  const int32_t* next = packed.numbers;
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

void start_step(Backend& backend, const Model& model, const KVPool& kv, const Batch& batch,
                const Result& result) {
  const auto step = std::make_shared<Step>(backend, model, kv, batch, result);
  step->start();
  backend.last = step;  // frees the one before, while the workers compute
}

void finish_step(Backend& backend) { backend.last->finish(); }

}  // namespace headwater
