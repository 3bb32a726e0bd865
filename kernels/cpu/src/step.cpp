#include "step.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "attention.h"
#include "batch_check.h"
#include "fetch_plan.h"
#include "weight_stream.h"

namespace headwater {
namespace {

// Rows of one linear item: their activations stay in the L2 cache, and kernels take six at a time.
constexpr int kChunkRows = 132;
constexpr int kOutputFloats = 2 * 2 * kTileRows * kChunkRows;
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

// Tokens that a layer computes together: all, or in the last one those whose logits are wanted.
struct Stage {
  int rows;
  Attention* attention;
  int first_row;  // in Workspace::x
};

}  // namespace

class Step {
 public:
  Step(Backend& backend, const Model& model, KVPool& kv, const PackedBatch& packed,
       const Result& result)
      : backend_(backend), isa_(backend.isa), model_(model), spec_(model.spec), kv_(kv),
        numbers_(packed.numbers, packed.numbers + packed.num_numbers),
        batch_(packed, numbers_.data()), result_(result), ws_(backend.workspace),
        attention_(backend, model, kv, batch_, 0),
        fetches_(attention_.plan, batch_, model, kv) {
    hidden_stride_ = round_up(spec_.hidden_size, kBlock);
    inner_stride_ = round_up(spec_.intermediate_size, kBlock);
    if (NarrowBatch::narrows(batch_)) {
      narrow_.emplace(batch_);
      wanted_.emplace(narrow_->batch());
      wanted_attention_.emplace(backend, model, kv, *wanted_, batch_.num_tokens);
    }
    const Stage all{batch_.num_tokens, &attention_, 0};
    Works layer, last, head;
    add_layer(layer, all);
    if (wanted_) add_last_layer(last, all);
    add_logits(head, wanted_ ? wanted_stage() : all);
    const int whole_layers = spec_.num_layers - (wanted_ ? 1 : 0);
    region_ = std::make_shared<Region>(backend_.pool.threads(),
                                       1 + whole_layers * layer.size() + last.size() + head.size());
    region_->add(by_rows(batch_.num_tokens, [this](int, int first, int end, int) {
      for (int row = first; row < end; ++row) embed(row);
    }));
    for (int l = 0; l < whole_layers; ++l)
      for (const auto& work : layer) region_->add(work, l);
    for (const auto& work : last) region_->add(work, whole_layers);
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
    if (wanted_) wanted_attention_->reserve();
    ws_.x.reserve((rows + (wanted_ ? batch_.num_rows : 0)) * hidden_stride_);
    ws_.inputs.reserve(rows, std::max(hidden_stride_, attention_.output_stride));
    ws_.inner.reserve(rows, inner_stride_);
    if (batch_.num_top) ws_.logits.reserve(size_t(batch_.num_rows) * spec_.vocab_size);
    for (ThreadScratch& scratch : ws_.threads) {
      scratch.inputs.reserve(kNormRows, widest);
      scratch.output.reserve(kOutputFloats);
      scratch.weights.reserve(size_t(widest) * kTileRows);
      scratch.best.reserve(batch_.num_top);
    }
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

  float* x_row(int row) const { return ws_.x.data() + size_t(row) * hidden_stride_; }

  static Acts acts(const Inputs& in, ptrdiff_t stride) {
    return {in.floats.data(), stride, in.int8.data(), in.int16.data()};
  }

  // --- phases ---------------------------------------------------------------------------------

  static void add(Works& works, Work work) {
    works.push_back(std::make_shared<const Work>(std::move(work)));
  }

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
      add(works, by_rows(rows, run_rows));
    add(works, std::move(work));
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

  static const float* bias(const std::vector<float>& b) { return b.empty() ? nullptr : b.data(); }

  void add_layer(Works& works, const Stage& stage) {
    add_norm_and(works, stage, &Layer::attn_norm, projections<0, 3>(stage));
    if (stage.rows > 1)
      add(works, by_rows(stage.rows, [stage](int layer, int first, int end, int) {
            stage.attention->turn_queries(layer, first, end);
            stage.attention->write(layer, first, end);
          }));
    add_attention(works, stage);
    add_mlp(works, stage);
  }

  // Keys and values of all tokens, and the rest of the layer for those whose logits are wanted.
  void add_last_layer(Works& works, const Stage& all) {
    const Stage stage = wanted_stage();
    add_norm_and(works, all, &Layer::attn_norm, projections<1, 2>(all));
    add(works, by_rows(all.rows, [all](int layer, int first, int end, int) {
          all.attention->write(layer, first, end);
        }));
    if (!stage.rows) return;
    add(works, by_rows(stage.rows, [this, stage](int, int first, int end, int) {
          for (int row = first; row < end; ++row) {
            std::copy_n(x_row(batch_.logit_rows[row]), hidden_stride_,
                        x_row(stage.first_row + row));
            stage.attention->find_angles(row);
          }
        }));
    add_norm_and(works, stage, &Layer::attn_norm, projections<0, 1>(stage));
    if (stage.rows > 1)
      add(works, by_rows(stage.rows, [stage](int layer, int first, int end, int) {
            stage.attention->turn_queries(layer, first, end);
          }));
    add_attention(works, stage);
    add_mlp(works, stage);
  }

  Stage wanted_stage() {
    return {batch_.num_rows, &*wanted_attention_, batch_.num_tokens};
  }

  // A product of the layer's input or of its MLP's, after their norm.
  void add_norm_and(Works& works, const Stage& stage, std::vector<float> Layer::* weight,
                    Work product) {
    add_product(
        works, stage.rows,
        [this, stage, weight](int layer, int first, int end, int thread) {
          const Layer& l = model_.layers[layer];
          const int kinds = weight == &Layer::attn_norm ? kind(l.q) | kind(l.k) | kind(l.v)
                                                        : kind(l.gate) | kind(l.up);
          norm_rows(stage, first, end, l.*weight, kinds, thread);
        },
        std::move(product));
  }

  // The products of so many of queries, keys and values.
  template <int kFirst, int kCount>
  Work projections(const Stage& stage) {
    return linear(
        stage.rows, spec_.num_layers, hidden_stride_,
        [this, stage](int layer) {
          const Layer& l = model_.layers[layer];
          const Attention& out = *stage.attention;
          const int stride = out.qkv_stride, heads = spec_.num_heads;
          const Product all[] = {
              {&l.q, bias(l.q_bias), out.query(0, 0), stride, false},
              {&l.k, bias(l.k_bias), out.query(0, heads), stride, false},
              {&l.v, bias(l.v_bias), out.query(0, heads + spec_.num_kv_heads), stride, false}};
          std::array<Product, kCount> some;
          std::copy_n(all + kFirst, kCount, some.begin());
          return some;
        },
        [this](int layer) { return fetches_.qkv(layer); });
  }

  void add_attention(Works& works, const Stage& stage) {
    Attention& attention = *stage.attention;
    add(works,
        {int(attention.plan.items.size()), [&attention](int layer, int item, int thread) {
           attention.attend(layer, item, thread);
         }});
    add_product(
        works, stage.rows,
        [this, stage](int layer, int first, int end, int thread) {
          gather(stage, first, end, kind(model_.layers[layer].o), thread);
        },
        linear(
            stage.rows, spec_.num_layers, attention.output_stride,
            [this, stage](int layer) {
              const Layer& l = model_.layers[layer];
              return std::array{Product{&l.o, bias(l.o_bias), x_row(stage.first_row), hidden_stride_, true}};
            },
            [this](int layer) { return fetches_.o(layer); }));
  }

  void add_mlp(Works& works, const Stage& stage) {
    add_norm_and(works, stage, &Layer::mlp_norm, gated(stage));
    add(works, linear(
        stage.rows, spec_.num_layers, inner_stride_,
        [this, stage](int layer) {
          return std::array{
              Product{&model_.layers[layer].down, nullptr, x_row(stage.first_row), hidden_stride_, true}};
        },
        [this](int layer) { return fetches_.down(layer); },
        &ws_.inner));
  }

  // inner = silu(gate x) * (up x), in the form that `down` wants. An item has whole blocks of it.
  Work gated(const Stage& stage) {
    const Matrix& shape = model_.layers[0].gate;
    const int rows = stage.rows, tiles = shape.tiles();
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
              Ahead ahead = fetches_.share(fetches_.gated(layer), item, all_items,
                                           2 * chances(l.gate, num_rows, count));
              gate(l, inputs(rows, thread), first_row, num_rows, tile, count, thread, ahead);
            },
            nullptr, [=](int layer, int item) { weights.fetch(layer, item % items); }};
  }

  void add_logits(Works& works, const Stage& stage) {
    const int rows = batch_.num_rows;
    if (rows)
      add_product(
          works, rows,
          [this, stage](int, int first, int end, int thread) {
            for (int row = first; row < end; ++row)
              norm(stage, wanted_ ? row : batch_.logit_rows[row], row, 1, model_.final_norm,
                   kind(model_.head), inputs(batch_.num_rows, thread), thread);
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
      // Two threads share a lone row.
      add(works, {2 * rows, [this](int, int item, int thread) {
                    item % 2 ? sum_logits(item / 2) : select(item / 2, thread);
                  }});
  }

  // --- items ----------------------------------------------------------------------------------

  void embed(int row) {
    float* x = x_row(row);
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

  // The norm of up to kNormRows rows of x as rows of a product's input.
  void norm(const Stage& stage, int from, int to, int rows, const std::vector<float>& weight,
            int kinds, Inputs& out, int thread) {
    float* y = kinds & kActF32 ? out.floats.data() + size_t(to) * hidden_stride_
                               : ws_.threads[thread].inputs.floats.data();
    isa_.rms_norm(x_row(stage.first_row + from), rows, weight.data(),
                  spec_.norm_eps, hidden_stride_, spec_.hidden_size, y);
    const int blocks = hidden_stride_ / kBlock;
    quantise(y, kBlock, rows * blocks, kinds, out, size_t(to) * blocks, 1);
  }

  // A few rows at a time, which stay in the L1 cache between norm and quantisation.
  void norm_rows(const Stage& stage, int first, int end, const std::vector<float>& weight,
                 int kinds, int thread) {
    for (int row = first; row < end; row += kNormRows)
      norm(stage, row, row, std::min(kNormRows, end - row), weight, kinds,
           inputs(stage.rows, thread), thread);
  }

  void gather(const Stage& stage, int first, int end, int kinds, int thread) {
    Attention& attention = *stage.attention;
    Inputs& out = inputs(stage.rows, thread);
    const int cols = spec_.num_heads * spec_.head_dim, stride = attention.output_stride;
    for (int row = first; row < end; ++row) {
      attention.merge(row, thread, out);
      float* y = attention.output(out, row, 0);
      std::fill(y + cols, y + stride, 0.0f);
    }
    const int blocks = stride / kBlock;
    quantise(attention.output(out, first, 0), kBlock, (end - first) * blocks, kinds, out,
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

  void gate(const Layer& layer, const Inputs& in, int first_row, int num_rows, int first_tile,
            int num_tiles, int thread, Ahead& ahead) {
    ThreadScratch& scratch = ws_.threads[thread];
    const Acts x = acts(in, hidden_stride_);
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
    Candidate* best = ws_.threads[thread].best.data();
    isa_.select(row_logits(row), spec_.vocab_size, batch_.num_top, best);
    for (int i = 0; i < batch_.num_top; ++i) {
      result_.top_ids[size_t(row) * batch_.num_top + i] = best[i].id;
      result_.top_logits[size_t(row) * batch_.num_top + i] = best[i].logit;
    }
  }

  void sum_logits(int row) {
    result_.logsumexp[row] = isa_.log_sum_exp(row_logits(row), spec_.vocab_size);
  }

  const float* row_logits(int row) const {
    return ws_.logits.data() + size_t(row) * spec_.vocab_size;
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
  std::optional<NarrowBatch> narrow_;  // where not all tokens' logits are wanted
  std::optional<Batch> wanted_;
  std::optional<Attention> wanted_attention_;
  int hidden_stride_ = 0, inner_stride_ = 0;
  std::shared_ptr<Region> region_;
};

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
