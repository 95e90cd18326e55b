{
  description = "A GPU kernel of Jetfire";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs = { self, kernel-builder, ... }: kernel-builder.lib.genKernelFlakeOutputs {
    inherit self;
    path = ./.;
  };
}
