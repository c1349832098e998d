// Measures the time that the recorder (comm/operation_recorder.h) adds to each operation: it enters
// issue, start and end, from one thread or from two at a time. Measures also an operation's state
// alone, with the recorder and without. With Google Benchmark:
//   recorder_bench --benchmark_format=json
#include <benchmark/benchmark.h>

#include <memory>

#include "comm/op_state.h"
#include "comm/operation_recorder.h"

namespace {

using namespace torchft_ext;

Operation allreduce() {
  Operation operation;
  operation.kind = OpKind::kAllreduce;
  operation.dtype = DType::kFloat;
  operation.outputs.resize(1);
  operation.outputs.front().bytes = 4096;
  operation.input_shape.dimensions = operation.output_shape.dimensions = 0;
  for (const int64_t size : {32, 32}) {
    operation.input_shape.add(size);
    operation.output_shape.add(size);
  }
  return operation;
}

// The clock is read once for the start; issue and end have a time already.
void entered(benchmark::State& state) {
  static OperationRecorder recorder("bench", OperationRecorder::kUsualCapacity);
  const Operation operation = allreduce();
  const Clock::time_point at = Clock::now();
  for (auto _ : state) {
    const uint64_t number = recorder.issued(operation, 1, 1, at, 1);
    recorder.started(number, Clock::now());
    recorder.ended(number, false, at);
  }
}
BENCHMARK(entered)->Threads(1)->Threads(2);

void operationState(benchmark::State& state, bool recorded) {
  const auto recorder =
      std::make_shared<OperationRecorder>("bench", OperationRecorder::kUsualCapacity);
  const auto lifecycle = std::make_shared<Lifecycle>(GenerationIdentity{"bench", 1, 0, 1}, nullptr,
                                                     kAskAfter, recorder);
  const Operation operation = allreduce();
  for (auto _ : state) {
    OpState op(lifecycle, OpKind::kAllreduce, 1, std::chrono::seconds(1));
    if (recorded) op.recordAs(recorder->issued(operation, 1, 1, op.issuedAt(), 1));
    op.noteStarted();
    op.complete(nullptr);
  }
}
BENCHMARK_CAPTURE(operationState, unrecorded, false);
BENCHMARK_CAPTURE(operationState, recorded, true);

}  // namespace

BENCHMARK_MAIN();
