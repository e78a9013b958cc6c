// Lets a card whose memory is the process's own compute by TensorFlow's kernels for the CPU.
//
// TensorFlow places and copies as it does for a real card; only what then runs is another kernel.

#include <memory>
#include <string>

#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace {

class OnTheHost : public kernel_factory::OpKernelFactory {
 public:
  OpKernel* Create(OpKernelConstruction* asked) override {
    std::shared_ptr<const NodeProperties> node;
    OpKernel* kernel = nullptr;
    absl::Status status =
        NodeProperties::CreateFromNodeDef(asked->def(), OpRegistry::Global(), &node);
    if (status.ok())
      status = CreateOpKernel(
          DEVICE_CPU, asked->device(), asked->device()->GetAllocator(AllocatorAttributes()),
          asked->function_library(), asked->resource_manager(), node,
          asked->graph_def_version(), &kernel);
    if (!status.ok()) asked->CtxFailure(status);
    return kernel;
  }
};

// Messages, and what calls functions: TensorFlow's own kernels for a card.
bool Stays(const std::string& op) {
  for (const char* one : {"_", "Collective", "Nccl", "If", "StatelessIf", "While", "StatelessWhile",
                          "For", "Case", "StatelessCase", "Partitioned", "StatefulPartitioned",
                          "RemoteCall", "Xla"})
    if (op.rfind(one, 0) == 0) return true;
  return false;
}

const bool kRegistered = [] {
  const KernelList all = GetAllRegisteredKernels();
  for (const KernelDef& one : all.kernel()) {
    if (one.device_type() != DEVICE_GPU || Stays(one.op())) continue;
    auto* ours = new KernelDef(one);  // the registry keeps it
    ours->set_priority(one.priority() + 1);
    kernel_factory::OpKernelRegistrar(ours, "OnTheHost", std::make_unique<OnTheHost>());
  }
  return true;
}();

}  // namespace
}  // namespace tensorflow
