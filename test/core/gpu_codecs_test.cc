// Gradients that GPUs encode, on the stand-in for NVIDIA's driver: the bytes, and what is held back, are those of the
// CPU's codecs, in whatever company they travel.
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>

#include "codec/codec.h"
#include "codec_cases.h"
#include "cuda/encoding.h"
#include "gpu.h"

namespace {

using namespace perseus_test;
namespace cuda = perseus::cuda;

// ---- one chunk after the other, without ranks ----------------------------------------------------------------------

struct Form {
  CodecSpec spec;
  cuda::ChunkForm form;
};
std::vector<Form> forms() {
  return {{spec_of(CodecKind::kFloat16), cuda::ChunkForm::kFloat16},
          {scaled_half(64), cuda::ChunkForm::kFloat16},
          {spec_of(CodecKind::kBFloat16), cuda::ChunkForm::kBFloat16},
          {spec_of(CodecKind::kInt8), cuda::ChunkForm::kInt8},
          {spec_of(CodecKind::kInt4), cuda::ChunkForm::kInt4},
          {spec_of(CodecKind::kInt2), cuda::ChunkForm::kInt2},
          {top_k(0.01, false), cuda::ChunkForm::kTopK},
          {top_k(0.02, true), cuda::ChunkForm::kTopKHalves},
          {top_k(0.3, false), cuda::ChunkForm::kTopK},
          {top_k(0.2, true), cuda::ChunkForm::kTopKHalves}};
}

// A gradient on a GPU, and what its codec holds back in page-locked memory.
class OnGpu {
 public:
  OnGpu(cuda::Device* device, const std::vector<float>& x, const std::vector<float>& held)
      : device_(*device), count_(x.size()), in_(x.size() * sizeof(float)), out_(in_.bytes()), staging_(device) {
    std::memcpy(in_.view(), x.data(), in_.bytes());
    const cuda::Device::Current current(device_);
    residual_ = device_.allocate(in_.bytes());
    std::memcpy(residual_.data, held.data(), in_.bytes());
    staging_.keep();
    staging_.add(in_.pointer(), in_.bytes(), out_.pointer(), in_.bytes(), false);
    staging_.load(nullptr, false);
    while (!staging_.computed()) std::this_thread::yield();
    EXPECT_TRUE(staging_.stay_encoded());
  }
  ~OnGpu() { device_.free(residual_, nullptr); }

  // What the host makes of what the GPU has left.
  std::vector<Byte> take_over(const WireFormat& codec) {
    std::vector<Byte> taken(codec.most_bytes(count_));
    if (!codec.selects()) {
      taken.resize(codec.take_over(slot(), residual(), count_, taken.data()));
      return taken;
    }
    perseus::ChunkSelection chunk{nullptr, residual(), nullptr, count_, slot()};
    std::vector<uint16_t> indices;
    codec.select(&chunk, 1, 1, &perseus::ThreadPool::none(), &indices);
    taken.resize(codec.encode_selected(chunk, indices.data(), taken.data()));
    return taken;
  }
  float* residual() { return reinterpret_cast<float*>(residual_.data); }
  std::vector<float> held() { return std::vector<float>(residual(), residual() + count_); }
  Byte* slot() { return staging_.slots(0, 0); }
  void add_to(cuda::Encoding* encoding, bool keeps_residual, float carry) {
    encoding->add({&staging_, 0, 0, in_.bytes(), false, keeps_residual ? residual() : nullptr, nullptr, carry});
  }
  std::vector<float> result() {
    staging_.end(true);
    staging_.join(nullptr);
    cuStreamSynchronize(nullptr);
    std::vector<float> x(count_);
    std::memcpy(x.data(), out_.view(), in_.bytes());
    return x;
  }

 private:
  cuda::Device& device_;
  const size_t count_;
  DeviceArray in_, out_;
  cuda::Staging staging_;
  cuda::Device::Block residual_;
};

// Everything that codecs are tested with, what is not finite, and NaNs of every kind.
std::vector<std::vector<float>> gradients_of(size_t count) {
  std::vector<std::vector<float>> gradients;
  for (const Values values : kAllValues) gradients.push_back(values_of(values, count, 1));
  const uint32_t special[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f812345, 0xff800001};
  for (size_t i = 0; i < std::size(special); ++i) {
    gradients.push_back(values_of(i % 2 == 0 ? Values::kWide : Values::kSparse, count, i));
    std::memcpy(&gradients.back()[(i * 611 + count / 2) % count], &special[i], sizeof(float));
  }
  return gradients;
}

TEST(GpuCodecs, ChunksAreThoseOfTheCpu) {
  const Gpu gpu(0, true);
  cuda::Device device(0);
  ASSERT_TRUE(device.encodes());
  std::vector<size_t> sizes(std::begin(kCodecSizes), std::end(kCodecSizes));
  sizes.insert(sizes.end(), {100, 511, 1025, 2000, 16383});
  size_t turn = 0;
  for (const Form& form : forms()) {
    const auto codec = perseus::make_codec(form.spec);
    for (const size_t count : sizes) {
      if (thin_grid() && ++turn % 3 != 0) continue;
      std::deque<OnGpu> on_gpu;
      std::vector<std::vector<Byte>> expected;
      std::vector<std::vector<float>> held;
      const float carry = count % 2 == 0 ? 1.0F : 0.3F;
      cuda::Encoding encoding;
      encoding.start(form.form, static_cast<float>(form.spec.scale));
      for (const std::vector<float>& x : gradients_of(count)) {
        std::vector<float> before = values_of(Values::kNormal, count, 5);
        if (!codec->keeps_residual()) before.assign(count, 0.0F);
        on_gpu.emplace_back(&device, x, before).add_to(&encoding, codec->keeps_residual(), carry);
        for (float& each : before) each *= carry;
        expected.push_back(encoded(*codec, x, codec->keeps_residual() ? &before : nullptr, 1));
        held.push_back(before);
      }
      while (!encoding.encoded()) std::this_thread::yield();
      for (size_t i = 0; i < on_gpu.size(); ++i) {
        const std::string text =
            perseus::codec_name(form.spec) + ", " + std::to_string(count) + " elements, values " + std::to_string(i);
        const std::vector<Byte> taken = on_gpu[i].take_over(*codec);
        EXPECT_TRUE(taken == expected[i]) << text;
        EXPECT_TRUE(same_bits(on_gpu[i].held(), held[i])) << text << ": what is held back";
        // Results come in any form that a CPU gives them.
        EXPECT_NO_THROW(codec->check(taken.data(), taken.size(), count)) << text;
        std::memcpy(on_gpu[i].slot(), expected[i].data(), expected[i].size());
      }
      encoding.decode();
      for (size_t i = 0; i < on_gpu.size(); ++i)
        EXPECT_TRUE(same_bits(on_gpu[i].result(), decoded(*codec, expected[i], count)))
            << perseus::codec_name(form.spec) << ", " << count << " elements, values " << i << ": decoded";
    }
  }
}

// ---- among ranks ---------------------------------------------------------------------------------------------------

WorldOptions each_rank_a_host(std::vector<std::string> more) {
  WorldOptions options;
  options.overrides = std::move(more);
  options.overrides.insert(options.overrides.end(), {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1"});
  return options;
}

// What the ranks of a training do.
struct Plan {
  std::vector<int64_t> counts = {7, 70'000, 1, 100'001, 16'384, 999, 300'001, 50'000};
  int steps = 3;
  bool in_place = true;
  bool grouped = false;  // all gradients in one request
  bool repeats = false;  // steps are alike, so that they may get a schedule
  double momentum = 0;
  std::function<bool(int rank)> on_cpu = [](int) { return false; };
  std::function<int(int step)> codec = [](int) { return PERSEUS_CODEC_SETTINGS; };
  // Which requests a rank submits, in which order; it waits for some before it submits the next ones.
  using Order = std::vector<std::vector<size_t>>;
  std::function<Order(int rank, int step, size_t requests)> order = [](int, int, size_t requests) {
    std::vector<size_t> all(requests);
    std::iota(all.begin(), all.end(), size_t{0});
    return Order{all};
  };
  std::function<double(int step)> learning_rate = [](int) { return 0.1; };
  std::function<void(int rank, int step, size_t tensor, std::vector<float>* x)> change = [](int, int, size_t, auto*) {};
};

struct Trained {
  std::vector<std::vector<float>> results, held;  // by rank
  bool operator==(const Trained& other) const {
    for (size_t rank = 0; rank < results.size(); ++rank)
      if (!same_bits(results[rank], other.results[rank]) || !same_bits(held[rank], other.held[rank])) return false;
    return results.size() == other.results.size();
  }
};

// One rank's tensors, wherever they are.
class Tensors {
 public:
  Tensors(const Plan& plan, int rank) : plan_(plan), rank_(rank) {
    if (!plan.on_cpu(rank)) gpu_.emplace(rank);
    for (const int64_t count : plan.counts) {
      const size_t bytes = static_cast<size_t>(count) * sizeof(float);
      if (gpu_) arrays_.emplace_back(bytes);
      if (gpu_ && !plan.in_place) arrays_.emplace_back(bytes);
      values_.emplace_back(static_cast<size_t>(count));
    }
  }
  void fill(int step) {
    for (size_t i = 0; i < values_.size(); ++i) {
      values_[i] = make_values(Values::kNormal, values_[i].size(), static_cast<uint64_t>(rank_ * 100 + step * 10) + i);
      plan_.change(rank_, step, i, &values_[i]);
      if (!gpu_) continue;
      gpu_->launch([this, i, x = values_[i]] { std::memcpy(in(i).view(), x.data(), in(i).bytes()); });
    }
  }
  perseus_tensor tensor(size_t i) {
    void* const from = gpu_ ? in(i).pointer() : values_[i].data();
    return {from, gpu_ ? out(i).pointer() : from, &plan_.counts[i], 1, PERSEUS_FLOAT32};
  }
  void place(perseus_request* request) {
    if (!gpu_) return;
    request->memory = PERSEUS_CUDA;
    request->device = gpu_->device();
    request->stream = gpu_->stream();
  }
  void join(perseus_context* context, perseus_handle handle) {
    if (!gpu_) return;
    EXPECT_EQ(perseus_handle_join(context, handle, gpu_->stream()), PERSEUS_OK) << perseus_error_message();
  }
  void append_results(std::vector<float>* to) {
    for (size_t i = 0; i < values_.size(); ++i) {
      if (gpu_) gpu_->launch([this, i] { std::memcpy(values_[i].data(), out(i).view(), out(i).bytes()); });
      if (gpu_) gpu_->synchronize();
      to->insert(to->end(), values_[i].begin(), values_[i].end());
    }
  }

 private:
  DeviceArray& in(size_t i) { return arrays_[plan_.in_place ? i : 2 * i]; }
  DeviceArray& out(size_t i) { return arrays_[plan_.in_place ? i : 2 * i + 1]; }

  const Plan& plan_;
  const int rank_;
  std::optional<Gpu> gpu_;
  std::deque<DeviceArray> arrays_;
  std::vector<std::vector<float>> values_;
};

std::vector<float> held_under(perseus_context* context, const std::string& name) {
  perseus_residual residual{};
  residual.struct_size = sizeof residual;
  residual.gradient_of = 1;
  residual.name = name.c_str();
  EXPECT_EQ(perseus_residual_read(context, &residual), PERSEUS_OK) << perseus_error_message();
  std::vector<float> held(residual.count);
  residual.data = held.empty() ? nullptr : held.data();
  EXPECT_EQ(perseus_residual_read(context, &residual), PERSEUS_OK) << perseus_error_message();
  return held;
}

Trained train(const Medium& medium, int ranks, const Plan& plan, const WorldOptions& options) {
  Trained trained;
  trained.results.resize(static_cast<size_t>(ranks));
  trained.held.resize(static_cast<size_t>(ranks));
  run_world(
      medium, ranks,
      [&](int rank, perseus_context* context) {
        Tensors tensors(plan, rank);
        const size_t count = plan.counts.size(), requests = plan.grouped ? 1 : count;
        const auto name_of_request = [](size_t i) { return "gradient" + std::to_string(i); };
        for (int step = 0; step < plan.steps; ++step) {
          tensors.fill(step);
          std::vector<perseus_tensor> described;
          for (size_t i = 0; i < count; ++i) described.push_back(tensors.tensor(i));
          for (const std::vector<size_t>& together : plan.order(rank, step, requests)) {
            std::vector<perseus_handle> handles;
            for (const size_t i : together) {
              const std::string name = name_of_request(i);
              perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &described[i],
                                                   plan.grouped ? static_cast<int>(count) : 1);
              request.op = step % 2 == 0 || plan.repeats ? PERSEUS_AVERAGE : PERSEUS_SUM;
              request.gradient_of = 1;
              request.codec = plan.codec(step);
              request.learning_rate = plan.learning_rate(step);
              request.momentum = plan.momentum;
              tensors.place(&request);
              const Outcome outcome = submit(context, request, &handles.emplace_back());
              ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            }
            for (const perseus_handle handle : handles) {
              const Outcome outcome = wait(context, handle);
              ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
              tensors.join(context, handle);
              EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
            }
          }
          tensors.append_results(&trained.results[static_cast<size_t>(rank)]);
        }
        std::vector<float>& held = trained.held[static_cast<size_t>(rank)];
        for (size_t i = 0; i < requests; ++i) {
          const std::vector<float> more = held_under(context, name_of_request(i));
          held.insert(held.end(), more.begin(), more.end());
        }
      },
      options);
  return trained;
}

const Medium kShm{"shm", "shm"}, kTcp{"tcp", "tcp"};

// With and without kernels that encode, to the same bits; the first time they encode something, the other time nothing.
void compare(const Medium& medium, int ranks, const Plan& plan, std::vector<std::string> settings,
             const std::string& text) {
  const bool all_on_cpu = [&] {
    for (int rank = 0; rank < ranks; ++rank)
      if (!plan.on_cpu(rank)) return false;
    return true;
  }();
  ASSERT_FALSE(all_on_cpu);
  const Trained by_cpus = [&] {
    const int before = standin_chunk_launches();
    const Trained trained = train(medium, ranks, plan, each_rank_a_host(settings));
    EXPECT_EQ(standin_chunk_launches(), before) << text;
    return trained;
  }();
  settings.emplace_back("PERSEUS_GPU_CODECS=1");
  const int before = standin_chunk_launches(), blocking = standin_blocking_calls();
  const Trained by_gpus = train(medium, ranks, plan, each_rank_a_host(settings));
  EXPECT_GT(standin_chunk_launches(), before) << text;
  EXPECT_EQ(standin_blocking_calls(), blocking) << text << ": the host waited for the GPU";
  EXPECT_TRUE(by_gpus == by_cpus) << text;
}

TEST(GpuCodecs, GradientsAreThoseOfTheCpu) {
  const std::vector<std::vector<std::string>> settings = {
      {},
      {"PERSEUS_ALLREDUCE_CODEC=int8"},
      {"PERSEUS_ALLREDUCE_CODEC=int4", "PERSEUS_ALLREDUCE_STREAMS=1", "PERSEUS_CODEC_THREADS=3"},
      {"PERSEUS_ALLREDUCE_CODEC=int2", "HOROVOD_FUSION_THRESHOLD=0"},
      {"PERSEUS_ALLREDUCE_CODEC=int8", "PERSEUS_ALLREDUCE_STREAMS=8", "HOROVOD_FUSION_THRESHOLD=65536"},
      {"PERSEUS_ALLREDUCE_DTYPE=2", "PERSEUS_ALLREDUCE_GRADIENT_SCALE=64"},
      {"LIGHT_TOPK_ALLREDUCE=1", "LIGHT_TOPK_THRESHOLD=0", "LIGHT_TOPK_RATIO=0.02", "LIGHT_TOPK_WARMUP_STEPS=2"},
      {"LIGHT_TOPK_ALLREDUCE=1", "LIGHT_TOPK_THRESHOLD=30000", "LIGHT_TOPK_FP16=1", "PERSEUS_CODEC_THREADS=3"},
  };
  for (size_t i = 0; i < settings.size(); ++i) {
    Plan plan;
    plan.in_place = i % 2 == 0;
    plan.grouped = i % 3 == 2;
    plan.steps = thin_grid() ? 2 : 3;
    if (thin_grid()) plan.counts = {7, 40'000, 16'384, 999};
    compare(i % 2 == 0 ? kTcp : kShm, 2 + static_cast<int>(i % 2), plan, settings[i],
            settings[i].empty() ? "default" : settings[i][0] + " " + std::to_string(i));
  }
}

// More runs than one launch has, of one bucket.
TEST(GpuCodecs, ManySmallTensorsShareLaunches) {
  Plan plan;
  plan.counts.clear();
  for (int i = 0; i < 230; ++i) plan.counts.push_back(1 + i * 7);
  plan.steps = 2;
  compare(kTcp, 2, plan, {"PERSEUS_ALLREDUCE_CODEC=int8"}, "many, int8");
  plan.grouped = true;
  compare(kTcp, 2, plan, {}, "many, float16");
}

TEST(GpuCodecs, RanksOnCpusAndGpusMeet) {
  Plan plan;
  plan.on_cpu = [](int rank) { return rank == 1; };
  compare(kTcp, 3, plan, {"PERSEUS_ALLREDUCE_CODEC=int8"}, "mixed, int8");
  compare(kTcp, 3, plan, {"LIGHT_TOPK_ALLREDUCE=1", "LIGHT_TOPK_THRESHOLD=0"}, "mixed, top-k");
  compare(kTcp, 2, plan, {}, "mixed, float16");
}

// One rank's gradients overflow in a step: the chunk travels as it is, and nothing of the others is lost.
TEST(GpuCodecs, WhatIsNotFinitePasses) {
  for (const char* setting :
       {"PERSEUS_ALLREDUCE_CODEC=int8", "PERSEUS_ALLREDUCE_CODEC=int2", "LIGHT_TOPK_ALLREDUCE=1", ""}) {
    Plan plan;
    plan.counts = {20'000, 300, 40'000};
    plan.steps = 4;
    plan.change = [](int rank, int step, size_t tensor, std::vector<float>* x) {
      if (rank == 0 && step == 1 && tensor != 1) (*x)[17'000] = std::numeric_limits<float>::infinity();
      if (rank == 1 && step == 2 && tensor == 1) (*x)[299] = std::numeric_limits<float>::quiet_NaN();
    };
    std::vector<std::string> settings = {"LIGHT_TOPK_THRESHOLD=0"};
    if (*setting != '\0') settings.emplace_back(setting);
    compare(kTcp, 2, plan, settings, std::string("not finite ") + setting);
  }
}

// What is held back is worth as much in the step that sends it, goes with the gradient when the codec changes, and
// travels with a codec that only CPUs know.
TEST(GpuCodecs, WhatIsHeldBackGoesOnWithAnotherRateAndCodec) {
  Plan plan;
  plan.counts = {20'000, 300};
  plan.steps = 6;
  plan.learning_rate = [](int step) { return step < 3 ? 0.1 : 0.03; };
  compare(kTcp, 2, plan, {"PERSEUS_ALLREDUCE_CODEC=int4"}, "rates");
  const int codecs[] = {PERSEUS_CODEC_INT8, PERSEUS_CODEC_TOP_K,  PERSEUS_CODEC_FLOAT16,
                        PERSEUS_CODEC_INT2, PERSEUS_CODEC_ROTATE, PERSEUS_CODEC_BFLOAT16};
  plan.codec = [&](int step) { return codecs[step]; };
  compare(kTcp, 2, plan, {"LIGHT_TOPK_THRESHOLD=0"}, "codecs");
}

// Of what GPUs do not encode, nothing changes.
TEST(GpuCodecs, OthersGoThroughHostMemory) {
  Plan plan;
  plan.counts = {20'000, 3'000};
  plan.steps = 2;
  plan.momentum = 0.9;
  for (const std::vector<std::string>& settings : std::vector<std::vector<std::string>>{
           {"PERSEUS_ALLREDUCE_DTYPE=1"},
           {"PERSEUS_ALLREDUCE_DTYPE=0"},
           {"PERSEUS_ALLREDUCE_CODEC=lossless"},
           {"LIGHT_TOPK_ALLREDUCE=1", "LIGHT_TOPK_THRESHOLD=0", "LIGHT_TOPK_MOMENTUM_CORRECTION=1"},
           {"PERSEUS_ALLREDUCE_NANCHECK=1"},
           {"PERSEUS_ACCUMULATE_N_STEPS=2"}}) {
    const Trained without = train(kTcp, 2, plan, each_rank_a_host(settings));
    std::vector<std::string> with = settings;
    with.emplace_back("PERSEUS_GPU_CODECS=1");
    const int before = standin_chunk_launches();
    EXPECT_TRUE(train(kTcp, 2, plan, each_rank_a_host(with)) == without) << settings[0];
    EXPECT_EQ(standin_chunk_launches(), before) << settings[0];
  }
}

// On a link so slow that no measurement of encoding matters: auto never takes exact chunks.
TEST(GpuCodecs, AutoGivesAllRanksTheSame) {
  Plan plan;
  plan.steps = 5;
  const int before = standin_chunk_launches();
  const Trained trained =
      train(kTcp, 2, plan,
            each_rank_a_host({"PERSEUS_ALLREDUCE_CODEC=auto", "PERSEUS_LINK_GBIT=0.00001", "PERSEUS_GPU_CODECS=1"}));
  EXPECT_TRUE(same_bits(trained.results[0], trained.results[1]));
  EXPECT_GT(standin_chunk_launches(), before);
}

// A driver that cannot have the kernels.
TEST(GpuCodecs, WithoutKernelsTheCpuEncodes) {
  ASSERT_EQ(setenv("STANDIN_CUDA_NO_KERNELS", "1", 1), 0);
  Plan plan;
  plan.counts = {20'000, 300};
  const int before = standin_chunk_launches();
  const std::vector<std::string> settings = {"PERSEUS_ALLREDUCE_CODEC=int8"};
  const Trained without = train(kTcp, 2, plan, each_rank_a_host(settings));
  EXPECT_TRUE(train(kTcp, 2, plan, each_rank_a_host({settings[0], "PERSEUS_GPU_CODECS=1"})) == without);
  EXPECT_EQ(standin_chunk_launches(), before);
  ASSERT_EQ(unsetenv("STANDIN_CUDA_NO_KERNELS"), 0);
}

// A schedule freezes and is left while a batch waits for a rank: it has encoded nothing, and no result is decoded.
TEST(GpuCodecs, ASchedulesBatchesAreRolledBack) {
  Plan plan;
  plan.counts = {2'000, 9'000, 16'000, 23'000, 30'000};
  plan.steps = 17;
  plan.repeats = true;
  plan.order = [](int rank, int step, size_t) -> Plan::Order {
    if (step % 8 != 7) return {{0}, {1}, {2}, {3}, {4}};
    return rank == 0 ? Plan::Order{{0, 1, 2, 3, 4}} : Plan::Order{{3}, {0, 1, 2, 4}};
  };
  for (const char* setting : {"PERSEUS_ALLREDUCE_CODEC=int8", "PERSEUS_ALLREDUCE_CODEC=int2", "LIGHT_TOPK_ALLREDUCE=1"})
    compare(kTcp, 2, plan, {"PERSEUS_OFFLINE_NEG=1", "LIGHT_TOPK_THRESHOLD=0", setting}, setting);
}

// ---- what fails ----------------------------------------------------------------------------------------------------

// Rank 0 has submitted a gradient on its GPU, then `before` happens, and then rank 1 submits its own, from a CPU.
void fails(const std::function<void()>& before, const std::function<void(int rank, perseus_context*)>& after,
           const std::function<void(const Outcome&)>& judge) {
  const auto operation = sum_of("gradient", 2, 100'000);
  Barrier submitted(2), prepared(2);
  const auto body = [&](int rank, perseus_context* context) {
    std::optional<Gpu> gpu;
    if (rank == 0) {
      gpu.emplace(0);
      DeviceCall call(*operation, rank, &*gpu);
      call.gradient_of = 1;
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      gpu->synchronize();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // so that rank 1 knows of it
      before();
      submitted.wait();
      after(rank, context);
      const Outcome outcome = wait(context, call.handle(), 60'000);
      prepared.wait();
      standin_break(0);
      standin_allow_host_memory(1 << 30);
      standin_set_delay(kStandinDelay);
      EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
      judge(outcome);
    } else {
      submitted.wait();
      Call call(*operation, rank);
      perseus_request request = call.request();
      request.gradient_of = 1;
      perseus_handle handle = 0;
      ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
      after(rank, context);
      EXPECT_NE(wait(context, handle).code, PERSEUS_OK);
      EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
      prepared.wait();
    }
  };
  run_world(kTcp, 2, body, each_rank_a_host({"PERSEUS_ALLREDUCE_CODEC=int8", "PERSEUS_GPU_CODECS=1"}));
}

const auto kNothing = [](int, perseus_context*) {};

TEST(GpuCodecs, AGpuThatFailsEndsTheWorld) {
  fails([] { standin_break(700); }, kNothing,
        [](const Outcome& outcome) {
          EXPECT_EQ(outcome.code, PERSEUS_IO);
          EXPECT_NE(outcome.message.find("CUDA_ERROR_ILLEGAL_ADDRESS"), std::string::npos) << outcome.message;
        });
}

TEST(GpuCodecs, PageLockedMemoryIsUsedUp) {
  fails([] { standin_allow_host_memory(0); }, kNothing,
        [](const Outcome& outcome) {
          EXPECT_EQ(outcome.code, PERSEUS_IO);
          EXPECT_NE(outcome.message.find("bytes of page-locked memory: CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos)
              << outcome.message;
        });
}

// Its tensors and what it has held back are freed at once: the stand-in ends the process if a kernel still uses them.
TEST(GpuCodecs, TheWorldEndsWhileAGpuEncodes) {
  const int before = standin_chunk_launches();
  fails(
      [] { standin_set_delay(400'000); },
      [before](int rank, perseus_context* context) {
        if (rank == 0) return;
        EXPECT_TRUE(comes_true([before] { return standin_chunk_launches() > before; }));
        perseus_context_abort(context, "enough");
      },
      [](const Outcome& outcome) { EXPECT_NE(outcome.message.find("enough"), std::string::npos) << outcome.message; });
}

}  // namespace
