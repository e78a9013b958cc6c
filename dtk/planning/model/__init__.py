"""Plans of `dtk plan --model`: in how many ways each layer of one model is divided.

    graph -> operators     what a Keras model computes, layer by layer
    choices                grids of ranks, and the ways each layer can be divided on one
    topology, traffic      what is sent for a choice, between whom, over which link
    rates, measure         seconds of computing a layer, by arithmetic or by the clock
    layer_costs            all of these for one layer: seconds, bytes, memory
    timeline               one training step, simulated: who computes and sends when
    split_steps, stage_steps   the tasks of a step on a grid, and of a pipeline's
    search                 the fastest choice of each layer; the fastest cuts into stages
    plans                  the best ones, and what `dtk.planning.load_plan` reads again
    advice, tables         what is said about them

After Jia, Zaharia and Aiken 2018, "Beyond Data and Model Parallelism for Deep Neural Networks"
(FlexFlow, arXiv:1807.05358), whose four dimensions are these:

    sample       rows of the batch, over the replicas of the grid
    operator     layers, over the stages of a pipeline
    attribute    rows or columns of an image
    parameter    output or input channels of a layer

Only `graph` and `measure` import Keras. docs/plan.md has the formulas, and how far they were off.
"""
