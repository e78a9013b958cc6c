"""Plans of `dtk plan --model`: in how many ways each layer of one model is divided.

    graph          what a Keras model computes, layer by layer
    measure        seconds of computing a layer, by the clock
    layer_costs    a layer, divided in one way, on a grid of ranks: seconds, bytes, memory
    search         the fastest choice for each layer, and of stages, on each grid
    report         what is said about them
    plans          the best one, as `dtk.planning.load_plan` reads it again

After Jia, Zaharia and Aiken 2018, "Beyond Data and Model Parallelism for Deep Neural Networks"
(FlexFlow, arXiv:1807.05358), whose four dimensions are these:

    sample       rows of the batch, over the replicas of the grid
    operator     layers, over the stages of a pipeline
    attribute    rows or columns of an image
    parameter    output or input channels of a layer

`graph` and `measure` alone use Keras. benchmarks/results/plan_model.md has how far predictions were
off.
"""
