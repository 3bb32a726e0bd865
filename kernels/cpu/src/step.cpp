#include "step.h"

#include <algorithm>
#include <array>
#include <utility>

#include "attention.h"
#include "batch_check.h"
#include "fetch_plan.h"
#include "weight_stream.h"

namespace headwater {
namespace {

constexpr int kChunkRows = 128;  // rows of one linear item: their activations stay in the L2 cache
constexpr int kOutputFloats = 8192;
constexpr int kNormRows = 4;

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
  Step(Backend& backend, const Model& model, KVPool& kv, const PackedBatch& packed,
       const Result& result)
      : backend_(backend), isa_(backend.isa), model_(model), spec_(model.spec), kv_(kv),
        numbers_(packed.numbers, packed.numbers + packed.num_numbers),
        batch_(packed, numbers_.data()), result_(result), ws_(backend.workspace),
        attention_(backend, model, kv, batch_),
        fetches_(attention_.plan, batch_, kv, kv.shape.page_size) {
    hidden_stride_ = round_up(spec_.hidden_size, kBlock);
    inner_stride_ = round_up(spec_.intermediate_size, kBlock);
    Works layer, head;
    add_attention(layer);
    add_mlp(layer);
    add_logits(head);
    region_ = std::make_shared<Region>(backend_.pool.threads(),
                                       1 + spec_.num_layers * layer.size() + head.size());
    region_->add(by_rows(batch_.num_tokens, [this](int, int first, int end, int) {
      for (int row = first; row < end; ++row) embed(row);
    }));
    for (int l = 0; l < spec_.num_layers; ++l)
      for (const auto& work : layer) region_->add(work, l);
    for (const auto& work : head) region_->add(work);
  }

  bool start(const int32_t* token_ids) {
    if (!are_tokens(token_ids, batch_.num_tokens, spec_)) return false;
    reserve();
    std::copy_n(token_ids, batch_.num_tokens, numbers_.begin());  // they are the first ones
    const int slot = *std::max_element(batch_.slot_mapping, batch_.slot_mapping + batch_.num_tokens);
    kv_.ahead.use((slot / kv_.shape.page_size + 1) * kv_.shape.page_bytes());
    backend_.pool.start(region_);
    return true;
  }

  void finish() { backend_.pool.finish(*region_); }

 private:
  using Works = std::vector<std::shared_ptr<const Work>>;

  void reserve() {
    const size_t rows = std::max(batch_.num_tokens, batch_.num_rows);
    const int widest = std::max({hidden_stride_, inner_stride_, attention_.output_stride});
    attention_.reserve();
    ws_.x.reserve(rows * hidden_stride_);
    reserve(ws_.inputs, rows, std::max(hidden_stride_, attention_.output_stride));
    reserve(ws_.inner, rows, inner_stride_);
    if (batch_.num_top) ws_.logits.reserve(size_t(batch_.num_rows) * spec_.vocab_size);
    for (ThreadScratch& scratch : ws_.threads) {
      reserve(scratch.inputs, 1, widest);
      scratch.output.reserve(kOutputFloats);
      scratch.weights.reserve(size_t(widest) * kTileRows);
      scratch.best.reserve(batch_.num_top);
    }
  }

  static void reserve(Inputs& inputs, size_t rows, int cols) {
    inputs.floats.reserve(rows * cols);
    inputs.int8.reserve(rows * cols / kBlock);
    inputs.int16.reserve(rows * cols / kBlock);
  }

  ActKind kind(const Matrix& w) const {
    if (backend_.exact || !w.quantised()) return kActF32;
    return w.four_bit() ? kActInt8 : kActInt16;
  }

  // Where a product of so many rows finds its input: each thread computes a single row for itself,
  // which takes less time than to wait for another.
  Inputs& inputs(int rows, int thread) const {
    return rows == 1 ? ws_.threads[thread].inputs : ws_.inputs;
  }

  static Acts acts(const Inputs& in, ptrdiff_t stride) {
    return {in.floats.data(), stride, in.int8.data(), in.int16.data()};
  }

  // --- phases ---------------------------------------------------------------------------------

  // run_rows(layer, first row, end, thread)
  template <class F>
  Work by_rows(int rows, F run_rows) const {
    const int per_item = std::max(1, rows / (backend_.pool.threads() * 4));
    return {ceil_div(rows, per_item), [=](int layer, int item, int thread) {
              run_rows(layer, item * per_item, std::min(rows, (item + 1) * per_item), thread);
            }};
  }

  // A product and what computes rows of its input.
  template <class F>
  void add_product(Works& works, int rows, F run_rows, Work work) const {
    if (rows == 1)
      work.prepare = [=](int layer, int thread) { run_rows(layer, 0, 1, thread); };
    else
      works.push_back(std::make_shared<const Work>(by_rows(rows, run_rows)));
    works.push_back(std::make_shared<const Work>(std::move(work)));
  }

  // Weight tiles of one item: enough items for all threads, outputs that fit the scratch, and pairs
  // of tiles where there are many rows.
  int tiles_per_item(int tiles, int rows) const {
    const int most = 2 * std::max(1, 16 / ceil_div(rows, 4));
    const int count = std::clamp(tiles / (backend_.pool.threads() * 8), 1, most);
    return rows > 2 ? round_up(count, 2) : count;
  }

  // products(layer) are as many, of the same shapes, for each of `layers`, part(layer) is what they
  // fetch. `given`: the input, where items before have computed it.
  template <class Products, class Part>
  Work linear(int rows, int layers, ptrdiff_t stride, Products products, Part part,
              const Inputs* given = nullptr) {
    const auto shapes = products(0);
    int tiles = 0, items = 0;
    for (const Product& p : shapes) tiles += p.w->tiles();
    const int per_item = tiles_per_item(tiles, rows);
    for (const Product& p : shapes) items += ceil_div(p.w->tiles(), per_item);
    WeightStream weights(int(shapes.size()));
    for (int l = 0; l < layers; ++l)
      for (const Product& p : products(l))
        weights.add(*p.w, ceil_div(p.w->tiles(), per_item), per_item);
    const int all_items = items * ceil_div(rows, kChunkRows);
    return {all_items,
            [=, this](int layer, int item, int thread) {
              const int first_row = item / items * kChunkRows;
              const int num_rows = std::min(kChunkRows, rows - first_row);
              int index = item % items;
              const auto list = products(layer);
              const Product* p = list.data();
              for (int n; index >= (n = ceil_div(p->w->tiles(), per_item)); ++p) index -= n;
              const int tile = index * per_item;
              const int tiles = std::min(per_item, p->w->tiles() - tile);
              Ahead ahead =
                  fetches_.share(part(layer), item, all_items, chances(*p->w, num_rows, tiles));
              const Acts x = acts(given ? *given : inputs(rows, thread), stride);
              product(*p, x, first_row, num_rows, tile, tiles, thread, ahead);
            },
            nullptr, [=](int layer, int item) { weights.fetch(layer, item % items); }};
  }

  // How often a product of that size could fetch something, at least.
  static int chances(const Matrix& w, int rows, int tiles) {
    return ceil_div(tiles, 2) * w.units() * ceil_div(rows, 6);
  }

  // The part of the pages of `layer` that is fetched by a product which begins after `before`
  // weights of those since the last attention, and has `own` of them.
  FetchPart fetch_part(int layer, double before, double own) const {
    if (layer == spec_.num_layers || model_.layers[layer].window) return {};
    double all = qkv_weights(layer);
    if (layer) all += o_weights(layer - 1) + mlp_weights(layer - 1);
    return {layer, before / all, (before + own) / all};
  }
  static const float* bias(const std::vector<float>& b) { return b.empty() ? nullptr : b.data(); }
  static double weights(const Matrix& w) { return double(w.rows) * w.cols; }
  double qkv_weights(int layer) const {
    const Layer& l = model_.layers[layer];
    return weights(l.q) + weights(l.k) + weights(l.v);
  }
  double o_weights(int layer) const { return weights(model_.layers[layer].o); }
  double mlp_weights(int layer) const { return 3 * weights(model_.layers[layer].down); }

  void add_attention(Works& works) {
    const int tokens = batch_.num_tokens, layers = spec_.num_layers;
    add_product(
        works, tokens,
        [this](int layer, int first, int end, int thread) {
          const Layer& l = model_.layers[layer];
          norm_rows(first, end, l.attn_norm, kind(l.q) | kind(l.k) | kind(l.v), thread);
        },
        linear(
            tokens, layers, hidden_stride_,
            [this](int layer) {
              const Layer& l = model_.layers[layer];
              const int stride = attention_.qkv_stride, heads = spec_.num_heads;
              return std::array{
                  Product{&l.q, bias(l.q_bias), attention_.query(0, 0), stride, false},
                  Product{&l.k, bias(l.k_bias), attention_.query(0, heads), stride, false},
                  Product{&l.v, bias(l.v_bias), attention_.query(0, heads + spec_.num_kv_heads),
                          stride, false}};
            },
            [this](int layer) {
              return fetch_part(layer, layer ? o_weights(layer - 1) + mlp_weights(layer - 1) : 0,
                                qkv_weights(layer));
            }));
    if (tokens > 1)
      works.push_back(std::make_shared<const Work>(by_rows(
          tokens, [this](int layer, int first, int end, int) {
            attention_.position(layer, first, end);
          })));
    works.push_back(std::make_shared<const Work>(Work{
        int(attention_.plan.items.size()), [this](int layer, int item, int thread) {
          attention_.attend(layer, item, thread);
        }}));
    add_product(
        works, tokens,
        [this](int layer, int first, int end, int thread) {
          gather(first, end, kind(model_.layers[layer].o), thread,
                 inputs(batch_.num_tokens, thread));
        },
        linear(
            tokens, layers, attention_.output_stride,
            [this](int layer) {
              const Layer& l = model_.layers[layer];
              return std::array{Product{&l.o, bias(l.o_bias), ws_.x.data(), hidden_stride_, true}};
            },
            [this](int layer) { return fetch_part(layer + 1, 0, o_weights(layer)); }));
  }

  void add_mlp(Works& works) {
    const int tokens = batch_.num_tokens, layers = spec_.num_layers;
    add_product(
        works, tokens,
        [this](int layer, int first, int end, int thread) {
          const Layer& l = model_.layers[layer];
          norm_rows(first, end, l.mlp_norm, kind(l.gate) | kind(l.up), thread);
        },
        gated());
    works.push_back(std::make_shared<const Work>(linear(
        tokens, layers, inner_stride_,
        [this](int layer) {
          return std::array{
              Product{&model_.layers[layer].down, nullptr, ws_.x.data(), hidden_stride_, true}};
        },
        [this](int layer) {
          const double o = o_weights(layer), mlp = mlp_weights(layer);
          return fetch_part(layer + 1, o + mlp * 2 / 3, mlp / 3);
        },
        &ws_.inner)));
  }

  // inner = silu(gate x) * (up x), in the form that `down` wants. An item has whole blocks of it.
  Work gated() {
    const Matrix& shape = model_.layers[0].gate;
    const int rows = batch_.num_tokens, tiles = shape.tiles();
    const int per_item = round_up(tiles_per_item(tiles, rows), kBlock / kTileRows);
    const int items = ceil_div(tiles, per_item);
    const int all_items = items * ceil_div(rows, kChunkRows);
    WeightStream weights(1);
    for (const Layer& l : model_.layers) weights.add(l.gate, items, per_item);
    return {all_items,
            [=, this](int layer, int item, int thread) {
              const Layer& l = model_.layers[layer];
              const int first_row = item / items * kChunkRows;
              const int num_rows = std::min(kChunkRows, rows - first_row);
              const int tile = item % items * per_item, count = std::min(per_item, tiles - tile);
              const FetchPart part =
                  fetch_part(layer + 1, o_weights(layer), mlp_weights(layer) * 2 / 3);
              Ahead ahead =
                  fetches_.share(part, item, all_items, 2 * chances(l.gate, num_rows, count));
              gate(l, first_row, num_rows, tile, count, thread, ahead);
            },
            nullptr, [=](int layer, int item) { weights.fetch(layer, item % items); }};
  }

  void add_logits(Works& works) {
    const int rows = batch_.num_rows;
    if (rows)
      add_product(
          works, rows,
          [this](int, int first, int end, int thread) {
            for (int row = first; row < end; ++row)
              norm(batch_.logit_rows[row], row, 1, model_.final_norm, kind(model_.head),
                   inputs(batch_.num_rows, thread));
          },
          linear(
              rows, 1, hidden_stride_,
              [this](int) {
                float* logits = batch_.num_top ? ws_.logits.data() : result_.full;
                return std::array{
                    Product{&model_.head, nullptr, logits, spec_.vocab_size, false}};
              },
              [](int) { return FetchPart(); }));
    if (batch_.num_top)
      works.push_back(std::make_shared<const Work>(
          by_rows(rows, [this](int, int first, int end, int thread) {
            for (int row = first; row < end; ++row) select(row, thread);
          })));
  }

  // --- items ----------------------------------------------------------------------------------

  void embed(int row) {
    float* x = ws_.x.data() + size_t(row) * hidden_stride_;
    isa_.unpack_row(model_.embedding, batch_.token_ids[row], x);
    std::fill(x + spec_.hidden_size, x + hidden_stride_, 0.0f);
    float* inner = ws_.inner.floats.data() + size_t(row) * inner_stride_;
    std::fill(inner + spec_.intermediate_size, inner + inner_stride_, 0.0f);
    attention_.find_angles(row);
  }

  // Blocks of activations, `stride` floats apart, to those from `block` on, `out_stride` apart.
  void quantise(const float* x, ptrdiff_t stride, int blocks, int kinds, Inputs& out, size_t block,
                ptrdiff_t out_stride) {
    if (kinds & kActInt8) isa_.quantise8(x, stride, blocks, out.int8.data() + block, out_stride);
    if (kinds & kActInt16)
      isa_.quantise16(x, stride, blocks, out.int16.data() + block, out_stride);
  }

  // The norm of `rows` rows of x as rows of a product's input.
  void norm(int from, int to, int rows, const std::vector<float>& weight, int kinds, Inputs& out) {
    float* y = out.floats.data() + size_t(to) * hidden_stride_;
    isa_.rms_norm(ws_.x.data() + size_t(from) * hidden_stride_, rows, weight.data(),
                  spec_.norm_eps, hidden_stride_, spec_.hidden_size, y);
    const int blocks = hidden_stride_ / kBlock;
    quantise(y, kBlock, rows * blocks, kinds, out, size_t(to) * blocks, 1);
  }

  // A few rows at a time, which stay in the L1 cache between norm and quantisation.
  void norm_rows(int first, int end, const std::vector<float>& weight, int kinds, int thread) {
    for (int row = first; row < end; row += kNormRows)
      norm(row, row, std::min(kNormRows, end - row), weight, kinds,
           inputs(batch_.num_tokens, thread));
  }

  void gather(int first, int end, int kinds, int thread, Inputs& out) {
    const int cols = spec_.num_heads * spec_.head_dim, stride = attention_.output_stride;
    for (int row = first; row < end; ++row) {
      attention_.merge(row, thread, out);
      float* y = attention_.output(out, row, 0);
      std::fill(y + cols, y + stride, 0.0f);
    }
    const int blocks = stride / kBlock;
    quantise(attention_.output(out, first, 0), kBlock, (end - first) * blocks, kinds, out,
             size_t(first) * blocks, 1);
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

  void gate(const Layer& layer, int first_row, int num_rows, int first_tile, int num_tiles,
            int thread, Ahead& ahead) {
    ThreadScratch& scratch = ws_.threads[thread];
    const Acts x = acts(inputs(batch_.num_tokens, thread), hidden_stride_);
    const int width = num_tiles * kTileRows;
    float* gate = scratch.output.data();
    float* up = gate + num_rows * width;
    isa_.linear(layer.gate, kind(layer.gate), x, first_row, num_rows, first_tile, num_tiles, gate,
                width, false, scratch.weights.data(), ahead);
    isa_.linear(layer.up, kind(layer.up), x, first_row, num_rows, first_tile, num_tiles, up, width,
                false, scratch.weights.data(), ahead);
    const int column = first_tile * kTileRows, kinds = kind(layer.down);
    const int cols = std::min(width, spec_.intermediate_size - column);
    isa_.silu_mul(gate, up, num_rows * width, gate);
    const size_t place = size_t(first_row) * inner_stride_ + column;
    if (kinds & kActF32)
      for (int r = 0; r < num_rows; ++r)
        std::copy_n(gate + r * width, cols, ws_.inner.floats.data() + place + r * inner_stride_);
    const int blocks = cols / kBlock, row_blocks = inner_stride_ / kBlock;
    if (num_rows > blocks)
      for (int b = 0; b < blocks; ++b)
        quantise(gate + b * kBlock, width, num_rows, kinds, ws_.inner, place / kBlock + b,
                 row_blocks);
    else
      for (int r = 0; r < num_rows; ++r)
        quantise(gate + r * width, kBlock, blocks, kinds, ws_.inner,
                 place / kBlock + r * row_blocks, 1);
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

  Backend& backend_;
  const Isa& isa_;
  const Model& model_;
  const Spec& spec_;
  KVPool& kv_;
  std::vector<int32_t> numbers_;  // of the batch
  const Batch batch_;
  const Result result_;
  Workspace& ws_;
  Attention attention_;
  const FetchPlan fetches_;
  int hidden_stride_ = 0, inner_stride_ = 0;
  std::shared_ptr<Region> region_;
};

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

bool prepare_step(Backend& backend, const Model& model, KVPool& kv, const PackedBatch& batch,
                  const Result& result) {
  backend.next.reset();
  if (!is_valid(Batch(batch, batch.numbers), model.spec, kv)) return false;
  backend.next = std::make_shared<Step>(backend, model, kv, batch, result);
  return true;
}

bool start_step(Backend& backend, const int32_t* token_ids) {
  if (!backend.next->start(token_ids)) return false;
  backend.running = true;
  backend.last = std::move(backend.next);  // frees the one before, while the workers compute
  return true;
}

void finish_step(Backend& backend) {
  backend.last->finish();
  backend.running = false;
}

}  // namespace headwater
