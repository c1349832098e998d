#include "torchft_ext/torch/ddp.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/nn/modules/embedding.h>

#include <torch/csrc/distributed/c10d/comm.hpp>
#include <unordered_set>

#include "base/raise.h"
#include "c10d/ddp/ddp_reducer.h"
#include "libtorch/group_backend.h"
#include "libtorch/torch_reducer.h"

namespace torchft_ext {
namespace {

using ModulePtr = std::shared_ptr<torch::nn::Module>;
using torch::autograd::variable_list;

constexpr size_t kBroadcastBytes = 250 * 1024 * 1024;  // at once; as Python's

bool givesSparseGradients(torch::nn::Module& module) {
  if (const auto* one = module.as<torch::nn::EmbeddingImpl>()) return one->options.sparse();
  if (const auto* bag = module.as<torch::nn::EmbeddingBagImpl>()) return bag->options.sparse();
  return false;
}

// In the order of the modules, each parameter once: Python's order, which decides on the buckets.
ReducerSpec specOf(const ModulePtr& module, const ProcessGroupPtr& group,
                   const DdpOptions& options) {
  ReducerSpec spec;
  spec.group = group;
  spec.bucket_bytes = options.bucket_bytes;
  spec.find_unused_parameters = options.find_unused_parameters;
  spec.gradient_as_bucket_view = options.gradient_as_bucket_view;
  std::unordered_set<const at::TensorImpl*> known;
  for (const auto& each : module->named_modules("", true)) {
    for (const auto& parameter : each.value()->named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = parameter.value();
      if (!tensor.requires_grad() || !known.insert(tensor.unsafeGetTensorImpl()).second) continue;
      spec.names[spec.parameters.size()] =
          each.key().empty() ? parameter.key() : each.key() + "." + parameter.key();
      spec.parameters.push_back(tensor);
      spec.sparse.push_back(givesSparseGradients(*each.value()));
    }
  }
  TORCH_CHECK_VALUE(!spec.parameters.empty(),
                    "DistributedDataParallel: module: expected one with a parameter that requires "
                    "gradients, found none");
  return spec;
}

void broadcastFromFirst(const ProcessGroupPtr& group, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> detached;
  detached.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) detached.push_back(tensor.detach());
  if (!detached.empty()) c10d::broadcast_coalesced(group, detached, kBroadcastBytes, 0);
}

// torch's reducer takes none but those that require gradients, which some may not do any more.
class AllTrainable {
 public:
  explicit AllTrainable(const std::vector<at::Tensor>& parameters) {
    for (const at::Tensor& parameter : parameters) {
      if (parameter.requires_grad()) continue;
      frozen_.push_back(parameter);
      frozen_.back().requires_grad_(true);
    }
  }
  ~AllTrainable() {
    for (const at::Tensor& parameter : frozen_) parameter.requires_grad_(false);
  }
  AllTrainable(const AllTrainable&) = delete;
  AllTrainable& operator=(const AllTrainable&) = delete;

 private:
  std::vector<at::Tensor> frozen_;
};

// What no loss uses gets an undefined gradient here, and so the parameters behind it are through.
struct UnusedOutputs : torch::autograd::Function<UnusedOutputs> {
  static variable_list forward(torch::autograd::AutogradContext* context, at::TensorList outputs) {
    context->set_materialize_grads(false);
    variable_list copies;
    for (const at::Tensor& output : outputs) copies.push_back(output.clone());
    return copies;
  }
  static variable_list backward(torch::autograd::AutogradContext*, const variable_list& gradients) {
    return gradients;
  }
};

// Before the node under an output: the other ranks are not in this generation any more.
class OldBackward : public torch::autograd::FunctionPreHook {
 public:
  OldBackward(std::string group, std::shared_ptr<const DdpReducer> reducer)
      : group_(std::move(group)), reducer_(std::move(reducer)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto how = reducer_->whyStale()) refuse(*how);
    return gradients;
  }

 private:
  [[noreturn]] void refuse(const std::string& how) const {
    auto failure = std::make_shared<Failure>();
    failure->kind = FailureKind::kAborted;
    failure->op = "backward";
    failure->group = group_;
    failure->generation = reducer_->generation();
    failure->cause.how = how;
    raiseAs<c10::DistBackendError>(FailurePtr(failure),
                                   c10::SourceLocation{__func__, __FILE__, __LINE__},
                                   "backward of DistributedDataParallel on '" + group_ +
                                       "': " + how + "; run forward() again");
  }

  const std::string group_;
  const std::shared_ptr<const DdpReducer> reducer_;
};

}  // namespace

struct DistributedDataParallel::Impl {
  const ModulePtr module;
  const ProcessGroupPtr group;
  const c10::intrusive_ptr<FtBackend> backend;
  const DdpOptions options;
  const ReducerSpec spec;

  std::shared_ptr<c10d::Reducer> reducer{};
  std::shared_ptr<c10d::Logger> logger{};
  std::shared_ptr<DdpReducer> watched{};
  std::shared_ptr<c10d::Reducer> before{};  // the last one, which a late autograd hook may enter
  bool complete = false;                    // false: a new reducer is being made, or that failed
  bool synchronises = true;
  bool accumulates = false;    // the last forward() was one without synchronisation
  bool buffers_differ = true;  // they are broadcast before the next forward()
  uint64_t first_node = 0;     // autograd's number of the first node that forward() makes

  void makeFirst() {
    if (options.init_sync) {
      c10d::verify_params_across_processes(group, spec.parameters, std::nullopt);
      std::vector<at::Tensor> state = module->parameters();
      if (options.broadcast_buffers) {
        for (const at::Tensor& buffer : module->buffers()) state.push_back(buffer);
      }
      broadcastFromFirst(group, state);
    }
    make();
    complete = true;
  }

  void make() {
    MadeReducer made = makeReducer(spec);
    reducer = std::move(made.reducer);
    logger = std::move(made.logger);
    watched = std::make_shared<DdpReducer>(backend, reducer, backend->generation());
    watched->readLayout();
  }

  // A new reducer in a new generation, which begins no collective: see ddp_reducer.h.
  void follow() {
    if (complete && !watched->whyStale()) {
      if (before) before->remove_autograd_hooks();  // no backward() of its generation is under way
      before.reset();
      return;
    }
    const c10::InferenceMode trains(false);
    const AllTrainable trainable(spec.parameters);
    complete = false;
    const std::shared_ptr<DdpReducer> last = watched;
    last->retire();  // its buckets go before there are new ones
    if (!before) before = reducer;
    make();
    watched->carryOver(*last, accumulates);
    buffers_differ = true;  // as a newcomer's object has it
    complete = true;
  }

  void begin() {
    follow();
    first_node = at::sequence_number::peek();
    accumulates = !synchronises;
    if (synchronises) reducer->prepare_for_forward();
    if (reducer->rebuild_buckets()) watched->readLayout();
    if (buffers_differ && options.broadcast_buffers) broadcastFromFirst(group, module->buffers());
    if (synchronises) watched->compareLayouts();
  }

  void end(const std::vector<at::Tensor*>& outputs) {
    buffers_differ = synchronises;
    if (synchronises) {
      std::vector<at::Tensor> used;
      if (options.find_unused_parameters) {
        for (const at::Tensor* output : outputs) used.push_back(*output);
      }
      reducer->prepare_for_backward(used);
    }
    if (options.find_unused_parameters) passThrough(outputs);
    if (synchronises) guard(outputs);
  }

  static void passThrough(const std::vector<at::Tensor*>& outputs) {
    std::vector<at::Tensor*> differentiable;
    std::vector<at::Tensor> tensors;
    for (at::Tensor* output : outputs) {
      if (!output->defined() || !output->grad_fn()) continue;
      differentiable.push_back(output);
      tensors.push_back(*output);
    }
    if (tensors.empty()) return;
    const variable_list passed = UnusedOutputs::apply(at::TensorList(tensors));
    for (size_t i = 0; i < differentiable.size(); ++i) *differentiable[i] = passed[i];
  }

  void guard(const std::vector<at::Tensor*>& outputs) const {
    std::unordered_set<torch::autograd::Node*> known;
    for (const at::Tensor* output : outputs) {
      if (!output->defined()) continue;
      refuseOld(output->grad_fn().get(), known);
      // What is done in place to a view gives it another node; that of its base stays below.
      if (output->is_view()) refuseOld(output->_base().grad_fn().get(), known);
    }
  }

  void refuseOld(torch::autograd::Node* node,
                 std::unordered_set<torch::autograd::Node*>& known) const {
    if (node == nullptr || !known.insert(node).second) return;
    if (node->sequence_nr() < first_node) return;  // it is the caller's
    node->add_pre_hook(std::make_unique<OldBackward>(backend->groupName(), watched));
  }
};

DistributedDataParallel::DistributedDataParallel(ModulePtr module, const ProcessGroupPtr& group,
                                                 const DdpOptions& options)
    : impl_([&] {
        auto backend = backendOf("DistributedDataParallel", group);
        TORCH_CHECK_VALUE(module, "DistributedDataParallel: module: expected one, found null");
        TORCH_CHECK_VALUE(!options.bucket_bytes || *options.bucket_bytes > 0,
                          "DistributedDataParallel: bucket_bytes: expected a positive number, "
                          "found ",
                          options.bucket_bytes.value_or(0));
        return new Impl{module, group, std::move(backend), options, specOf(module, group, options)};
      }()) {
  impl_->makeFirst();
}

DistributedDataParallel::~DistributedDataParallel() = default;

const ModulePtr& DistributedDataParallel::module() const {
  return impl_->module;
}

void DistributedDataParallel::begin() {
  if (at::GradMode::is_enabled()) impl_->begin();
}

void DistributedDataParallel::end(const std::vector<at::Tensor*>& outputs) {
  if (at::GradMode::is_enabled()) impl_->end(outputs);
}

bool DistributedDataParallel::synchronise(bool on) {
  return std::exchange(impl_->synchronises, on);
}

}  // namespace torchft_ext
