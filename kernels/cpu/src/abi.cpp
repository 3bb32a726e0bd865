// The C ABI that kernels/cpu/backend.py binds. Functions return null or a status that is not 0 when
// memory is exhausted; arguments are checked by the caller, but for the numbers of a batch.
#include <algorithm>
#include <cstring>
#include <new>

#include "step.h"

using namespace headwater;

namespace {

constexpr int kAbiVersion = 6;
constexpr int kNoMemory = -1, kInvalid = -2;

template <class F>
auto guarded(F make) noexcept -> decltype(make()) {
  try {
    return make();
  } catch (...) {
    return nullptr;
  }
}

template <class F>
int status(F succeeds) noexcept {
  try {
    return succeeds() ? 0 : kInvalid;
  } catch (...) {
    return kNoMemory;
  }
}

// Walks a page in logical order, its elements [layer, K|V, kv_head, slot, head_dim] and then, where
// it has them, its scales [layer, K|V, kv_head, slot]: visit(place in the page, number of bytes).
template <class F>
void each_element(const PageShape& s, F visit) {
  const auto heads = [&](auto visit_head) {
    for (int layer = 0; layer < s.num_layers; ++layer)
      for (int value = 0; value < 2; ++value)
        for (int h = 0; h < s.num_kv_heads; ++h)
          visit_head(value != 0, s.layer_bytes() * layer + s.head_bytes() * h);
  };
  const size_t size = s.element_bytes();
  heads([&](bool value, size_t head) {
    for (int slot = 0; slot < s.page_size; ++slot)
      for (int d = 0; d < s.head_dim; ++d) {
        const size_t place =
            value ? s.key_bytes() + s.value_index(slot, d) * size : s.key_index(slot, d) * size;
        visit(head + place, size);
      }
  });
  if (!s.scaled()) return;
  heads([&](bool value, size_t head) {
    for (int slot = 0; slot < s.page_size; ++slot)
      visit(head + (value ? s.value_scales() : s.key_scales()) + sizeof(float) * slot,
            sizeof(float));
  });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int hw_abi_version() { return kAbiVersion; }

// isa: 0 AVX2, 1 AVX-512, 2 AVX-512 with BF16.
Backend* hw_open(int threads, int exact, int isa) {
  return guarded([&] {
    const Isa& table = isa == 2 ? avx512_bf16() : isa == 1 ? avx512() : avx2();
    return new Backend(table, threads, exact != 0);
  });
}
const char* hw_isa(const Backend* backend) { return backend->isa.name; }
void hw_close(Backend* backend) { delete backend; }

Model* hw_load(Backend* backend, const Spec* spec, const SourceWeight* weights) {
  return guarded([&] { return new Model(backend->pool, *spec, weights); });
}
void hw_free_model(Model* model) { delete model; }
int64_t hw_model_bytes(const Model* model) { return int64_t(model->arena.bytes()); }

KVPool* hw_alloc_kv(int layers, int kv_heads, int head_dim, int page_size, int type,
                    int num_pages) {
  return guarded([&] {
    const PageShape shape{layers, kv_heads, head_dim, page_size, PageType(type)};
    return new KVPool(shape, num_pages);
  });
}
void hw_free_kv(KVPool* kv) { delete kv; }

void hw_copy_pages(KVPool* kv, const int32_t* src, const int32_t* dst, int n) {
  for (int i = 0; i < n; ++i)
    std::memcpy(kv->page(dst[i]), kv->page(src[i]), kv->shape.page_bytes());
}
void hw_export_page(const KVPool* kv, int page, uint8_t* out) {
  const uint8_t* in = kv->page(page);
  each_element(kv->shape, [&](size_t place, size_t bytes) {
    std::memcpy(out, in + place, bytes);
    out += bytes;
  });
}
void hw_import_page(KVPool* kv, int page, const uint8_t* data) {
  uint8_t* out = kv->page(page);
  each_element(kv->shape, [&](size_t place, size_t bytes) {
    std::memcpy(out + place, data, bytes);
    data += bytes;
  });
}

// Prepares a step, perhaps while another runs, in place of one that was prepared and not begun;
// there is none where the status is not 0.
int hw_prepare(Backend* backend, const Model* model, KVPool* kv, const PackedBatch* batch,
               const Result* result) {
  if (!backend->running) backend->pool.wake();
  return status([&] { return prepare_step(*backend, *model, *kv, *batch, *result); });
}
// Begins the prepared step, with these tokens, which `hw_finish` ends; nothing is begun where the
// status is not 0.
int hw_start(Backend* backend, const int32_t* token_ids) {
  return status([&] { return start_step(*backend, token_ids); });
}
void hw_finish(Backend* backend) { finish_step(*backend); }

// Reads `bytes` at `data` once with all threads; the sum keeps the reads from being left out.
uint64_t hw_read(Backend* backend, const uint64_t* data, int64_t bytes) {
  constexpr int64_t kItemWords = 1 << 17;
  const int64_t words = bytes / 8;
  std::atomic<uint64_t> total{0};
  const auto region = std::make_shared<Region>(backend->pool.threads());
  region->add({int((words + kItemWords - 1) / kItemWords), [&](int, int item, int) {
                 const int64_t end = std::min(words, (item + 1) * kItemWords);
                 uint64_t sum = 0;
                 for (int64_t i = item * kItemWords; i < end; ++i) sum += data[i];
                 total += sum;
               }});
  backend->pool.run(region);
  return total;
}

// The kernels' multiply-adds on all threads; returns the products done.
int64_t hw_multiply(Backend* backend, int integer, int64_t rounds) {
  std::atomic<int64_t> total{0};
  const auto region = std::make_shared<Region>(backend->pool.threads());
  const int items = backend->pool.threads() * 16;
  region->add({items, [&](int, int, int) {
                 total += backend->isa.multiply(integer != 0, rounds / items);
               }});
  backend->pool.run(region);
  return total;
}

}  // extern "C"
#pragma GCC visibility pop
