"""Plans of `dtk plan --model`: in how many ways each layer of one model is divided.

    loading -> graph -> operators   what a Keras model computes, layer by layer
    topology                        grids of ranks: who sends to whom, over which link
    rates, measure                  seconds of computing a layer, by arithmetic or by the clock
    layer_costs                     a layer, divided in one way: seconds, bytes, memory
    timeline                        a training step, simulated: who computes and sends when
    split_steps, stage_steps        the tasks of a step on a grid, and of a pipeline's
    search -> candidates            the fastest choice for each layer, on each grid
    report                          what is said about them
    plans                           the best one, as `dtk.planning.load_plan` reads it again

After Jia, Zaharia and Aiken 2018, "Beyond Data and Model Parallelism for Deep Neural Networks"
(FlexFlow, arXiv:1807.05358), whose four dimensions are these:

    sample       rows of the batch, over the replicas of the grid
    operator     layers, over the stages of a pipeline
    attribute    rows or columns of an image
    parameter    output or input channels of a layer

`loading`, `graph` and `measure` alone use Keras. benchmarks/results/plan_model.md has
how far predictions were off.
"""
