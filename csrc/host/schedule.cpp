#include "host/schedule.h"

#include <utility>

#include "host/schedule_builder.h"

namespace torchft_ext {
namespace {

// With one rank every kind is a copy at most: the sum, the mean, the concatenation of one is
// itself.
void buildAlone(ScheduleBuilder& builder) {
  const Operation& operation = builder.operation();
  if (operation.inputs.empty() || operation.outputs.empty()) return;
  builder.copyInChunks(operation.outputs[0], operation.inputs[0].data);
}

void build(ScheduleBuilder& builder) {
  if (builder.size() == 1) return buildAlone(builder);
  switch (builder.operation().kind) {
    case OpKind::kAllreduce:
      return buildAllreduce(builder);
    case OpKind::kBroadcast:
      return buildBroadcast(builder);
    case OpKind::kAllgather:
    case OpKind::kSparseAllreduce:
      return buildAllgather(builder);
    case OpKind::kReduceScatter:
      return buildReduceScatter(builder);
    case OpKind::kReduce:
      return buildReduce(builder);
    case OpKind::kGather:
      return buildGather(builder);
    case OpKind::kScatter:
      return buildScatter(builder);
    case OpKind::kAlltoall:
      return buildAlltoall(builder);
    case OpKind::kBarrier:
      return buildBarrier(builder);
    case OpKind::kSend:
    case OpKind::kRecv:
      return;  // not collectives: see messages.h
  }
}

bool reduces(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

Schedule makeScaled(Operation operation, int rank, int size, const ScheduleTuning& tuning) {
  ScheduleBuilder builder(operation, rank, size, tuning);
  scaleContribution(builder, operation);
  build(builder);
  return builder.take();
}

// FNV-1a over the sizes that every rank knows alike.
uint32_t hashOfSizes(const std::vector<Buffer>& buffers) {
  uint32_t hash = 2166136261U;
  for (const Buffer& buffer : buffers) {
    for (unsigned shift = 0; shift < 64; shift += 8) {
      hash =
          (hash ^ static_cast<uint8_t>(static_cast<uint64_t>(buffer.bytes) >> shift)) * 16777619U;
    }
  }
  return hash;
}

uint32_t hashOfSharedSizes(const Operation& operation) {
  switch (operation.kind) {
    case OpKind::kAllreduce:
    case OpKind::kBroadcast:
    case OpKind::kAllgather:
    case OpKind::kSparseAllreduce:
      return hashOfSizes(operation.outputs);
    case OpKind::kReduceScatter:
    case OpKind::kReduce:
      return hashOfSizes(operation.inputs);
    default:
      return 0;  // only the two ends of a transfer know its size: its frame's length is compared
  }
}

}  // namespace

bool hasRoot(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}

Schedule makeSchedule(const Operation& operation, int rank, int size,
                      const ScheduleTuning& tuning) {
  if (reduces(operation.kind) && operation.reduce == ReduceKind::kPreMulSum)
    return makeScaled(operation, rank, size, tuning);
  ScheduleBuilder builder(operation, rank, size, tuning);
  build(builder);
  return builder.take();
}

// Issued in a nameless callback, so that it never pairs with a thread's.
constexpr uint64_t kInCallback = uint64_t{1} << 63;
constexpr uint64_t kOfBucket = uint64_t{1} << 62;
constexpr uint64_t kLayoutBits = (uint64_t{1} << 48) - 1;
constexpr int kTorchDtypeShift = 32;

// in a callback 1 bit | of a bucket 1 | kind 6 | dtype 4 | reduction 4 | root 16 | hash of the
// sizes 32. A bucket's layout goes into the hash, and where there is no root into the place of
// that. A message has its torch_dtype in the root's place.
uint64_t signatureOf(const Operation& operation) {
  uint64_t signature = static_cast<uint64_t>(operation.kind) << 56;
  if (operation.kind != OpKind::kBarrier) signature |= static_cast<uint64_t>(operation.dtype) << 52;
  if (reduces(operation.kind)) signature |= static_cast<uint64_t>(operation.reduce) << 48;
  if (hasRoot(operation.kind)) signature |= (static_cast<uint64_t>(operation.root) & 0xffffU) << 32;
  signature |= hashOfSharedSizes(operation);
  if (operation.in_nameless_callback) signature |= kInCallback;
  if (operation.layout == 0) return signature;
  const uint64_t bits = hasRoot(operation.kind) ? 0xffffffffU : kLayoutBits;
  return (signature ^ (operation.layout & bits)) | kOfBucket;
}

uint64_t signatureOfMessage(DType dtype, uint8_t torch_dtype) {
  Operation message;
  message.kind = OpKind::kSend;
  message.dtype = dtype;
  return signatureOf(message) | static_cast<uint64_t>(torch_dtype) << kTorchDtypeShift;
}

std::string nameOfItems(DType dtype, uint8_t torch_dtype) {
  // By c10::ScalarType, whose numbers never change; those without a DType.
  static constexpr std::pair<int, const char*> kNames[] = {
      {23, "float8_e5m2"},     {24, "float8_e4m3fn"},  {25, "float8_e5m2fnuz"},
      {26, "float8_e4m3fnuz"}, {27, "uint16"},         {28, "uint32"},
      {29, "uint64"},          {44, "float8_e8m0fnu"}, {45, "float4_e2m1fn_x2"}};
  if (torch_dtype == 0) return toString(dtype);
  const int number = torch_dtype - 1;
  for (const auto& [known, name] : kNames)
    if (known == number) return name;
  return "torch's dtype number " + std::to_string(number);
}

std::string describeSignature(uint64_t signature) {
  const bool of_bucket = (signature & kOfBucket) != 0;
  const auto kind = static_cast<OpKind>(signature >> 56 & 0x3fU);
  if (kind > OpKind::kSparseAllreduce) return "an unknown operation";
  if ((signature & kInCallback) != 0)
    return describeSignature(signature & ~kInCallback) + " (issued in a callback)";
  std::string text = toString(kind);
  if (of_bucket) text += " of a bucket of gradients";
  if (kind == OpKind::kBarrier) return text;
  if (reduces(kind)) {
    text += std::string(" (") + toString(static_cast<ReduceKind>(signature >> 48 & 0xfU)) + ")";
  }
  const auto dtype = static_cast<DType>(signature >> 52 & 0xfU);
  const auto torch_dtype = static_cast<uint8_t>(signature >> kTorchDtypeShift & 0xffU);
  text += of_bucket ? " in " : " of ";
  text += nameOfItems(dtype, kind == OpKind::kSend ? torch_dtype : uint8_t{0});
  if (hasRoot(kind)) text += " with root " + std::to_string(signature >> 32 & 0xffffU);
  return text;
}

bool differInLayout(uint64_t one, uint64_t other) {
  return one != other && (one & other & kOfBucket) != 0 && ((one ^ other) & ~kLayoutBits) == 0;
}

std::string describeDifference(uint64_t theirs, uint64_t ours, uint64_t number, int rank) {
  const std::string issued = describeSignature(theirs);
  const std::string expected = describeSignature(ours);
  const std::string place = " as collective " + std::to_string(number) + " of the generation";
  if (differInLayout(theirs, ours)) {
    return "it issued " + issued + place + " with another bucket layout than rank " +
           std::to_string(rank) +
           ": its gradients belong to other parameters; the DDP objects must wrap the same model";
  }
  if (issued == expected)
    return "it issued " + issued + place + " with other sizes than rank " + std::to_string(rank);
  return "it issued " + issued + place + ", where rank " + std::to_string(rank) + " issued " +
         expected;
}

}  // namespace torchft_ext
